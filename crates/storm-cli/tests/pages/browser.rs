//! Pages in a headless Chromium. They are shown in frames, which can have any width. Windows
//! cannot.

use crate::chromium;
use serde_json::Value;
use std::fmt::Write;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// A check takes seconds. One that hangs is ended.
const PATIENCE: Duration = Duration::from_secs(180);

/// Height of a frame while its page is measured. Scroll bars are as on a screen.
const FRAME_HEIGHT: u32 = 900;

/// Comes before everything else in a page. Records errors, and draws by timers, because headless
/// frames are not always drawn.
const LISTENER: &str = "<script>window.errorsOfPage = [];\
    window.requestAnimationFrame = (draw) => setTimeout(draw);\
    addEventListener('error', (event) => \
        errorsOfPage.push(event.message ?? `cannot load <${event.target.tagName.toLowerCase()}>`), true);\
    addEventListener('unhandledrejection', (event) => errorsOfPage.push(String(event.reason)));\
    addEventListener('securitypolicyviolation', (event) => errorsOfPage.push(`${event.violatedDirective} ${event.blockedURI}`));\
    </script>";

pub(crate) struct Browser {
    program: PathBuf,
}

impl Browser {
    /// `None` if this machine has no Chromium.
    pub(crate) fn find() -> Option<Browser> {
        let program = chromium::find();
        if program.is_none() {
            eprintln!("not checked: {}", chromium::INSTALL);
        }
        program.map(|program| Browser { program })
    }

    /// What `checks.js` finds in each page at each width.
    pub(crate) fn check(&self, pages: &[(&str, String)], widths: &[u32]) -> Vec<Value> {
        let frames: Vec<(&str, &str, u32, u32)> = pages
            .iter()
            .flat_map(|(name, page)| {
                widths.iter().map(|&width| (*name, &**page, width, FRAME_HEIGHT))
            })
            .collect();
        let host = host(&frames, include_str!("checks.js"));
        let folder = TempDir::new().expect("a folder");
        let dom = self.open(folder.path(), &host, &["--virtual-time-budget=30000", "--dump-dom"]);
        let found =
            dom.split_once("<pre id=\"findings\">").and_then(|(_, rest)| rest.split_once("</pre>"));
        let (found, _) = found.unwrap_or_else(|| panic!("Chromium did not open the page: {dom}"));
        let found = found
            .replace("&lt;", "<")
            .replace("&gt;", ">")
            .replace("&nbsp;", "\u{a0}")
            .replace("&amp;", "&");
        serde_json::from_str(&found).unwrap_or_else(|error| panic!("{error} in {found:?}"))
    }

    /// Saves a screenshot of a page in several widths side by side, each in full height.
    pub(crate) fn picture(&self, name: &str, page: &str, widths: &[u32], findings: &[Value]) {
        let height = |width: u32| {
            let found =
                findings.iter().find(|found| found["page"] == name && found["width"] == width);
            found.and_then(|found| found["height"].as_u64()).expect("the page was measured") as u32
        };
        let frames: Vec<(&str, &str, u32, u32)> =
            widths.iter().map(|&width| (name, page, width, height(width))).collect();
        let script = "addEventListener('load', () => document.querySelectorAll('iframe').forEach((frame) => {\
            const plot = frame.contentDocument.querySelector('.plot');\
            const box = plot?.getBoundingClientRect();\
            plot?.dispatchEvent(new frame.contentWindow.PointerEvent('pointermove',\
                { clientX: box.left + 0.6 * box.width, clientY: box.top + 20 }));\
        }))";
        let folder = TempDir::new().expect("a folder");
        let pictures = Path::new(env!("CARGO_TARGET_TMPDIR")).join("pages");
        fs::create_dir_all(&pictures).expect("a folder");
        let picture = pictures.join(format!("{name}.png"));
        let size =
            [widths.iter().sum::<u32>(), frames.iter().map(|frame| frame.3).max().unwrap_or(0)];
        let flags = [
            format!("--screenshot={}", picture.display()),
            format!("--window-size={},{}", size[0], size[1]),
            "--virtual-time-budget=5000".to_owned(),
        ];
        self.open(folder.path(), &host(&frames, script), &flags.each_ref().map(String::as_str));
        let bytes = fs::read(&picture).expect("a picture");
        // Big-endian, as in PNG.
        let number = |at: usize| {
            bytes.get(at..at + 4).map(|bytes| bytes.iter().fold(0, |n, &b| n << 8 | u32::from(b)))
        };
        assert_eq!([number(16), number(20)], size.map(Some), "{}", picture.display());
    }

    /// Opens a page from a file, and returns what Chromium prints.
    fn open(&self, folder: &Path, page: &str, flags: &[&str]) -> String {
        let file = folder.join("page.html");
        fs::write(&file, page).expect("a file");
        let mut command = Command::new(&self.program);
        command
            // The sandbox does not work for root, and these pages are ours.
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
            ])
            .args(["--no-first-run", "--disable-extensions", "--disable-background-networking"])
            .arg(format!("--user-data-dir={}", folder.join("profile").display()))
            .args(flags)
            .arg(format!("file://{}", file.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child =
            command.spawn().unwrap_or_else(|error| panic!("{}: {error}", self.program.display()));
        let mut stdout = child.stdout.take().expect("a pipe");
        let (send, receive) = mpsc::channel();
        let reader = thread::spawn(move || {
            let mut printed = String::new();
            stdout.read_to_string(&mut printed).expect("text");
            // If this fails, the receiver has timed out.
            send.send(printed).ok();
        });
        let printed = receive.recv_timeout(PATIENCE);
        if printed.is_err() {
            child.kill().ok();
        }
        let status = child.wait().expect("it ends");
        let printed =
            printed.unwrap_or_else(|_| panic!("Chromium was not done after {PATIENCE:?}"));
        reader.join().expect("it has read");
        assert!(status.success(), "Chromium: {status}");
        printed
    }
}

/// A page with other pages in frames: name, page, width and height of each.
fn host(frames: &[(&str, &str, u32, u32)], script: &str) -> String {
    let mut host = "<!doctype html><html><head><meta charset=\"utf-8\"><style>body { margin: 0; white-space: nowrap; } \
                    iframe { border: 0; vertical-align: top; }</style></head><body>"
        .to_owned();
    for (name, page, width, height) in frames {
        let page = page.replacen("<head>", &format!("<head>{LISTENER}"), 1);
        let page = page.replace('&', "&amp;").replace('"', "&quot;");
        let _ = write!(
            host,
            "<iframe data-page=\"{name}\" width=\"{width}\" height=\"{height}\" srcdoc=\"{page}\"></iframe>"
        );
    }
    let _ = write!(host, "<pre id=\"findings\"></pre><script>{script}</script></body></html>");
    host
}
