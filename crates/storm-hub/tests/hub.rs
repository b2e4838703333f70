//! Downloads from a hub served by the test process, with everything that goes wrong on a network.

use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use storm_hub::{Hub, HubError, HubName, Snapshot, Wanted};
use tempfile::TempDir;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// What a hub contains, and how it behaves.
#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    /// After how many bytes of each body the connection ends, as long as there are entries.
    cuts: Vec<usize>,
    /// Sent instead of every answer.
    status: Option<u16>,
    /// Instead of the hash of a file.
    etag: Option<String>,
    /// Bytes are changed on their way.
    is_bad_line: bool,
    /// First lines of requests, with the requested range.
    asked: Vec<String>,
    token: Option<String>,
}

struct Server {
    state: Arc<Mutex<State>>,
    endpoint: String,
    cache: TempDir,
}

impl Server {
    fn new(files: &[(&str, &[u8])]) -> Server {
        let files = files.iter().map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec()));
        let state = State { files: files.collect(), ..State::default() };
        let state = Arc::new(Mutex::new(state));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::clone(&state);
        // It ends with the process.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let state = Arc::clone(&shared);
                std::thread::spawn(move || serve(stream, &state));
            }
        });
        Server { state, endpoint, cache: TempDir::new().unwrap() }
    }

    fn hub(&self) -> Hub {
        Hub {
            cache: self.cache.path().join("hub"),
            endpoint: self.endpoint.clone(),
            token: None,
            is_offline: false,
            retry_pause: Duration::ZERO,
        }
    }

    fn get(&self, name: &str) -> Result<Snapshot, HubError> {
        get(&self.hub(), name, Wanted::All)
    }

    fn asked(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().asked)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap());
    }
}

fn get(hub: &Hub, name: &str, wanted: Wanted) -> Result<Snapshot, HubError> {
    let is_carried = |name: &str| name.starts_with("tokenizer") || name == "LICENSE";
    hub.get(&HubName::parse(name).unwrap(), wanted, is_carried, &mut |_| {})
}

/// Answers the requests of one connection, one by one.
fn serve(mut stream: TcpStream, state: &Mutex<State>) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
    let Some(first) = lines.next() else { return };
    let (mut range, mut token) = (None, None);
    for line in lines.by_ref().take_while(|line| !line.is_empty()) {
        let (name, value) = line.split_once(": ").unwrap();
        match name.to_lowercase().as_str() {
            "range" => range = Some(value.to_owned()),
            "authorization" => token = Some(value.to_owned()),
            _ => {}
        }
    }
    let path = first.split(' ').nth(1).unwrap().to_owned();
    let mut state = state.lock().unwrap();
    state.asked.push(format!("{path} {}", range.as_deref().unwrap_or("")).trim().to_owned());
    state.token = token;
    let mut answer = |status: u16, headers: &str, body: &[u8], sent: usize| {
        let head = format!(
            "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n",
            body.len()
        );
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body[..sent]));
    };
    if let Some(status) = state.status {
        return answer(status, "", b"", 0);
    }
    if path.starts_with("/api/models/o/m/revision/") {
        let siblings: Vec<_> =
            state.files.keys().map(|name| serde_json::json!({"rfilename": name})).collect();
        let info = serde_json::json!({"sha": COMMIT, "siblings": siblings}).to_string();
        return answer(200, "", info.as_bytes(), info.len());
    }
    let file = path.strip_prefix(&format!("/o/m/resolve/{COMMIT}/")).map(str::to_owned);
    let Some(bytes) = file.and_then(|file| state.files.get(&file).cloned()) else {
        return answer(404, "", b"", 0);
    };
    let range = range.unwrap();
    let (from, to) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
    let from: usize = from.parse().unwrap();
    let to = to.parse().map_or(bytes.len(), |to: usize| (to + 1).min(bytes.len()));
    let etag = state.etag.clone().unwrap_or_else(|| format!("{:x}", Sha256::digest(&bytes)));
    let headers = format!(
        "etag: \"{etag}\"\r\nx-repo-commit: {COMMIT}\r\ncontent-range: bytes {from}-{}/{}\r\n",
        to.max(1) - 1,
        bytes.len()
    );
    let mut body = bytes[from.min(to)..to].to_vec();
    let is_probe = range == "bytes=0-0";
    if state.is_bad_line && !is_probe {
        body.iter_mut().for_each(|byte| *byte ^= 1);
    }
    let is_weights = path.ends_with(".safetensors") && !is_probe;
    let sent = if is_weights { state.cuts.pop() } else { None };
    answer(206, &headers, &body, sent.unwrap_or(body.len()).min(body.len()));
}

const CONFIG: (&str, &[u8]) = ("config.json", b"{}");
const OTHERS: [(&str, &[u8]); 5] = [
    ("LICENSE", b"free"),
    ("README.md", b"read"),
    ("tokenizer.json", b"{\"a\": 1}"),
    ("tokenizer.py", b"import os"),
    ("pytorch_model.bin", b"pickle"),
];

/// The files of a folder, links followed.
fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: PathBuf| {
        (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap())
    };
    entries.map(read).collect()
}

#[test]
fn a_model_is_downloaded_once() {
    let weights: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
    let all = [&OTHERS[..], &[CONFIG, ("model.safetensors", &weights)]].concat();
    let server = Server::new(&all);
    let snapshot = server.get("o/m").unwrap();
    assert_eq!((snapshot.revision.as_str(), snapshot.is_new), (COMMIT, true));
    let found = contents(&snapshot.directory);
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(names, ["LICENSE", "config.json", "model.safetensors", "tokenizer.json"]);
    assert!(found["model.safetensors"] == weights);
    server.asked();
    let again = server.get("o/m").unwrap();
    assert_eq!(again, Snapshot { is_new: false, ..snapshot.clone() });
    // At its commit, and also without a network.
    let offline = Hub { is_offline: true, ..server.hub() };
    assert_eq!(get(&offline, &format!("o/m@{COMMIT}"), Wanted::All).unwrap(), again);
    assert!(server.asked().is_empty());
    let error = get(&offline, "o/other", Wanted::All).unwrap_err().to_string();
    assert!(error.contains("HF_HUB_OFFLINE"), "{error}");
}

#[test]
fn a_config_alone_is_enough_for_a_plan() {
    let server = Server::new(&[CONFIG, ("model.safetensors", b"weights")]);
    let snapshot = get(&server.hub(), "o/m", Wanted::Config).unwrap();
    assert_eq!(contents(&snapshot.directory).len(), 1);
    assert!(!server.asked().iter().any(|line| line.contains("safetensors")));
    // A partial model does not pass for the complete one.
    assert_eq!(contents(&server.get("o/m").unwrap().directory).len(), 2);
}

#[test]
fn shards_are_those_of_the_index() {
    let index = br#"{"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-1.safetensors"}}"#;
    let name = "model.safetensors.index.json";
    let shards: [(&str, &[u8]); 3] =
        [("x-1.safetensors", b"one"), ("x-2.safetensors", b"two"), ("other.safetensors", b"three")];
    let server = Server::new(&[&[CONFIG, (name, index)], &shards[..]].concat());
    let snapshot = server.get("o/m").unwrap();
    let found = contents(&snapshot.directory);
    assert_eq!(found.len(), 4);
    assert_eq!(found["x-2.safetensors"], b"two");
    // A missing shard is downloaded again, and nothing else.
    fs::remove_file(snapshot.directory.join("x-2.safetensors")).unwrap();
    server.asked();
    assert!(server.get("o/m").unwrap().is_new);
    let asked = server.asked();
    assert!(
        asked.iter().all(|line| line.contains("revision") || line.contains("x-2")),
        "{asked:?}"
    );

    for index in [
        &br#"{"weight_map": {"a": "../x.safetensors"}}"#[..],
        br#"{"weight_map": {"a": "x.bin"}}"#,
        b"{",
    ] {
        let server = Server::new(&[CONFIG, (name, index), ("x.bin", b"p")]);
        let error = server.get("o/m").unwrap_err();
        assert!(matches!(error, HubError::Damaged { .. }), "{error}");
    }
    let server = Server::new(&[CONFIG, (name, index)]);
    let error = server.get("o/m").unwrap_err().to_string();
    assert!(error.contains("x-1.safetensors, which is not there"), "{error}");
}

#[test]
fn a_download_that_broke_goes_on_where_it_stopped() {
    let weights: Vec<u8> = (0..50_000_u32).map(|i| (i % 241) as u8).collect();
    let server = Server::new(&[CONFIG, ("model.safetensors", &weights)]);
    // The connection breaks once, and the download succeeds.
    server.change(|state| state.cuts = vec![20_000]);
    let snapshot = server.get("o/m").unwrap();
    assert!(contents(&snapshot.directory)["model.safetensors"] == weights);
    let asked = server.asked();
    let from = |asked: &[String]| -> Vec<usize> {
        let ranges = asked.iter().filter_map(|line| line.split_once("safetensors bytes="));
        let ranges = ranges.map(|(_, range)| range).filter(|range| *range != "0-0");
        ranges.map(|range| range.trim_end_matches('-').parse().unwrap()).collect()
    };
    assert_eq!(from(&asked), [0, 20_000]);

    // More failures than retries: the next call resumes.
    let server = Server::new(&[CONFIG, ("model.safetensors", &weights)]);
    server.change(|state| state.cuts = vec![0, 0, 0, 30_000]);
    let error = server.get("o/m").unwrap_err();
    assert!(matches!(error, HubError::Network { .. }), "{error}");
    assert!(error.to_string().contains("goes on where this one stopped"), "{error}");
    assert!(server.hub().find(&HubName::parse("o/m").unwrap(), Wanted::All).is_none());
    server.asked();
    server.change(|state| state.cuts.clear());
    let snapshot = server.get("o/m").unwrap();
    assert!(contents(&snapshot.directory)["model.safetensors"] == weights);
    assert_eq!(from(&server.asked()), [30_000]);
    // A part that was complete when its process was killed, and a part of another file.
    for bytes in [weights.clone(), vec![0; 60_000]] {
        let blob = fs::canonicalize(snapshot.directory.join("model.safetensors")).unwrap();
        fs::remove_file(snapshot.directory.join("model.safetensors")).unwrap();
        fs::remove_file(&blob).unwrap();
        fs::write(blob.with_extension("part"), &bytes).unwrap();
        assert!(contents(&server.get("o/m").unwrap().directory)["model.safetensors"] == weights);
        let expected = if bytes == weights { 49_999 } else { 0 };
        assert_eq!(from(&server.asked()), [expected]);
    }
}

#[test]
fn what_may_not_be_had_is_said_in_words() {
    let pickles = Server::new(&[CONFIG, OTHERS[4], OTHERS[2]]);
    let error = pickles.get("o/m").unwrap_err().to_string();
    assert!(
        error.contains("only as pytorch_model.bin") && error.contains("safetensors"),
        "{error}"
    );
    assert!(!pickles.asked().iter().any(|line| line.contains("resolve")));
    let empty = Server::new(&[CONFIG]);
    assert!(matches!(empty.get("o/m"), Err(HubError::NotAModel { .. })));
    let server = Server::new(&[CONFIG, ("model.safetensors", b"weights")]);
    assert!(matches!(server.get("o/other"), Err(HubError::NotFound { .. })));
    for (status, token, part) in [
        (401, None, "check the name"),
        (401, Some("t"), "Accept its conditions on"),
        (403, None, "HF_TOKEN"),
        (404, Some("t"), "check the name"),
        (500, None, "cannot download"),
    ] {
        server.change(|state| state.status = Some(status));
        let hub = Hub { token: token.map(str::to_owned), ..server.hub() };
        let error = get(&hub, "o/m", Wanted::All).unwrap_err().to_string();
        assert!(error.contains(part), "{status}: {error}");
        let expected = token.map(|token| format!("Bearer {token}"));
        assert_eq!(server.state.lock().unwrap().token, expected);
    }
    let unreachable = Hub { endpoint: "http://127.0.0.1:9".to_owned(), ..server.hub() };
    let error = get(&unreachable, "o/m", Wanted::All).unwrap_err();
    assert!(matches!(error, HubError::Network { .. }), "{error}");
}

#[test]
fn a_hub_that_lies_harms_nothing() {
    let server = Server::new(&[CONFIG, ("model.safetensors", b"weights")]);
    for etag in ["../../../evil", "a/b", "", "..", "0123456789abcdef/x"] {
        server.change(|state| state.etag = Some(etag.to_owned()));
        let error = server.get("o/m").unwrap_err();
        assert!(!matches!(error, HubError::Io { .. }), "{etag}: {error}");
    }
    assert!(!server.cache.path().join("evil").exists());
    assert!(fs::read_dir(server.cache.path()).unwrap().count() <= 1);
    server.change(|state| (state.etag, state.is_bad_line) = (None, true));
    let error = server.get("o/m").unwrap_err().to_string();
    assert!(error.contains("its hash is not the one that the hub names"), "{error}");
    server.change(|state| state.is_bad_line = false);
    assert!(server.get("o/m").unwrap().is_new);
}
