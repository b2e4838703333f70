//! One safetensors file: honest, damaged, hostile.

use std::fs::{self, File};
use std::path::PathBuf;

use half::{bf16, f16};
use safetensors::tensor::{Dtype as ReferenceDtype, TensorView, serialize};
use storm_model::{Dtype, ModelError, SafetensorsFile};
use tempfile::TempDir;

use crate::support::{Random, entries, file_bytes, frugal, peak_bytes, write_anew};

struct Scratch {
    folder: TempDir,
}

impl Scratch {
    fn new() -> Self {
        Self { folder: TempDir::new().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("model.safetensors")
    }

    fn open(&self, bytes: &[u8]) -> Result<SafetensorsFile, ModelError> {
        write_anew(&self.path(), bytes);
        frugal(|| SafetensorsFile::open(&self.path()))
    }
}

/// A file by the reference implementation, with one tensor of each type that is read.
fn honest() -> Vec<u8> {
    let floats: Vec<u8> = [1.5f32, -2.0, f32::NAN, 0.1, f32::MIN_POSITIVE, -0.0]
        .iter()
        .flat_map(|v| v.to_le_bytes())
        .collect();
    let halves: Vec<u8> =
        [0.5f32, -3.0].iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect();
    let brains: Vec<u8> =
        [0.25f32, 7.0, -1.0].iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect();
    let tensors = [
        ("floats", TensorView::new(ReferenceDtype::F32, vec![2, 3], &floats).unwrap()),
        ("halves", TensorView::new(ReferenceDtype::F16, vec![2], &halves).unwrap()),
        ("brains", TensorView::new(ReferenceDtype::BF16, vec![3, 1], &brains).unwrap()),
        ("bytes", TensorView::new(ReferenceDtype::U8, vec![5], &[1, 2, 3, 4, 5]).unwrap()),
        ("none", TensorView::new(ReferenceDtype::F32, vec![0, 4], &[]).unwrap()),
    ];
    serialize(tensors, None).unwrap()
}

fn read_f32(file: &SafetensorsFile, name: &str) -> Result<Vec<f32>, ModelError> {
    let entry = &file.tensors()[name];
    let mut values = vec![0.0; entry.element_count()];
    file.read_elements(name, entry, 0, &mut values).map(|()| values)
}

#[test]
fn what_the_reference_writes_is_read() {
    let scratch = Scratch::new();
    let file = scratch.open(&honest()).unwrap();
    assert_eq!(file.tensors().len(), 5);
    let floats = read_f32(&file, "floats").unwrap();
    assert_eq!((floats[0], floats[3]), (1.5, 0.1));
    assert!(floats[2].is_nan());
    assert_eq!(read_f32(&file, "halves").unwrap(), [0.5, -3.0]);
    assert_eq!(read_f32(&file, "brains").unwrap(), [0.25, 7.0, -1.0]);
    assert_eq!(read_f32(&file, "none").unwrap(), [0.0; 0]);
    let entry = &file.tensors()["brains"];
    assert_eq!((entry.dtype, entry.shape.as_slice()), (Dtype::BF16, [3, 1].as_slice()));
    let mut last = [bf16::ZERO];
    file.read_elements("brains", entry, 2, &mut last).unwrap();
    assert_eq!(last[0].to_f32(), -1.0);
}

#[test]
fn reads_outside_a_tensor_are_errors() {
    let scratch = Scratch::new();
    let file = scratch.open(&honest()).unwrap();
    let entry = &file.tensors()["floats"];
    assert!(matches!(read_f32(&file, "bytes"), Err(ModelError::UnsupportedDtype { .. })));
    for (first, length) in [(0, 7), (6, 1), (5, 2), (usize::MAX, 1)] {
        let result = file.read_elements("floats", entry, first, &mut vec![0f32; length]);
        assert!(matches!(result, Err(ModelError::WrongLength { .. })));
    }
    assert!(file.read_bytes(entry, 24, &mut [0]).is_err());
    assert!(file.read_bytes(entry, u64::MAX, &mut [0]).is_err());
    // The file shrinks after it was opened.
    File::options().write(true).open(scratch.path()).unwrap().set_len(100).unwrap();
    assert!(matches!(
        read_f32(&file, "bytes").or(read_f32(&file, "floats")),
        Err(ModelError::Io { .. })
    ));
}

#[test]
fn cut_off_anywhere() {
    let scratch = Scratch::new();
    let bytes = honest();
    for length in 0..bytes.len() {
        let error = scratch.open(&bytes[..length]).unwrap_err();
        assert!(matches!(error, ModelError::Safetensors { .. }), "{length}: {error}");
    }
    let longer = [bytes.as_slice(), &[0]].concat();
    assert!(matches!(scratch.open(&longer), Err(ModelError::Safetensors { .. })));
}

/// Each header, with 16 bytes of data behind it, breaks one rule.
#[test]
fn hostile_headers() {
    let t = |inner: &str| format!("{{\"t\":{{{inner}}}}}");
    let many_sizes =
        format!(r#""dtype":"F32","shape":[{}4],"data_offsets":[0,16]"#, "1,".repeat(1 << 20));
    let deep = format!("{{\"t\":{}", "[".repeat(1 << 20));
    let deep_extra = format!(r#"{{"t":{{"x":{}"#, "{\"x\":".repeat(1 << 20));
    let cases: Vec<(String, &str)> = vec![
        (String::new(), "does not parse"),
        ("null".into(), "does not parse"),
        ("[]".into(), "does not parse"),
        ("{".into(), "does not parse"),
        ("{}".into(), "the tensors end at byte 0"),
        ("{}{}".into(), "does not parse"),
        (t(r#""dtype":"F32","shape":[4],"data_offsets":[0,16]}"#), "does not parse"),
        (t(r#""dtype":"F32","shape":[4]"#), "lacks dtype, shape or data_offsets"),
        (t(r#""dtype":"Q4","shape":[4],"data_offsets":[0,16]"#), "unknown type Q4"),
        (t(r#""dtype":4,"shape":[4],"data_offsets":[0,16]"#), "does not parse"),
        (t(r#""dtype":"F32","shape":[5],"data_offsets":[0,16]"#), "does not have the size of [5] F32"),
        (t(r#""dtype":"F32","shape":[-4],"data_offsets":[0,16]"#), "does not parse"),
        (t(r#""dtype":"F32","shape":[4.0],"data_offsets":[0,16]"#), "does not parse"),
        (t(r#""dtype":"F32","shape":[NaN],"data_offsets":[0,16]"#), "does not parse"),
        (t(r#""dtype":"F32","shape":[4],"data_offsets":[0,17]"#), "lies outside"),
        (t(r#""dtype":"F32","shape":[4],"data_offsets":[16,0]"#), "ends before it starts"),
        (t(r#""dtype":"F32","shape":[4],"data_offsets":[0]"#), "does not parse"),
        (t(r#""dtype":"F32","shape":[4],"data_offsets":[0,16,32]"#), "does not parse"),
        (t(r#""dtype":"F32","shape":[4],"data_offsets":[-16,0]"#), "does not parse"),
        (t(r#""dtype":"F32","shape":[4],"data_offsets":[18446744073709551600,18446744073709551615]"#), "lies outside"),
        (t(r#""dtype":"F32","shape":[4],"data_offsets":[0,18446744073709551616]"#), "does not parse"),
        (t(r#""dtype":"F32","shape":[4],"data_offsets":[0,16],"dtype":"F32""#), "occurs twice"),
        // 2^62 elements of 4 bytes: 2^64, which is 0 to those who do not look.
        (t(r#""dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]"#), "does not have the size"),
        (t(r#""dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,16]"#), "does not have the size"),
        (t(r#""dtype":"F32","shape":[18446744073709551615,2,0],"data_offsets":[0,16]"#), "does not have the size"),
        (t(&many_sizes), "more than 8 dimensions"),
        (r#"{"t":4}"#.into(), "does not parse"),
        (r#"{"__metadata__":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#.into(), "__metadata__"),
        (r#"{"__metadata__":7}"#.into(), "does not parse"),
        (
            r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#.into(),
            "\\\"a\\\" occurs twice",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#.into(),
            "overlaps",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#.into(),
            "overlaps",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#.into(),
            "leaves a hole",
        ),
        (r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}}"#.into(), "leaves a hole"),
        (r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#.into(), "the tensors end at byte 12"),
        (deep, "does not parse"),
        (deep_extra, "does not parse"),
    ];
    let scratch = Scratch::new();
    for (header, expected) in cases {
        let shown: String = header.chars().take(120).collect();
        let error = scratch.open(&file_bytes(header.as_bytes(), 16)).expect_err(&shown);
        assert!(matches!(error, ModelError::Safetensors { .. }), "{shown}: {error}");
        let message = error.to_string();
        assert!(message.contains(expected), "{shown}\n  says: {message}\n  lacks: {expected}");
        assert!(message.len() < 1000, "{message}");
    }
    for header in [b"{\"\xff\":{}}".as_slice(), b"\xff\xfe", b"{\"t\":{\"dtype\":\"\xc0\xaf\"}}"] {
        assert!(matches!(
            scratch.open(&file_bytes(header, 16)),
            Err(ModelError::Safetensors { .. })
        ));
    }
}

/// Files are sparse: large in length only.
#[test]
fn headers_that_claim_to_be_huge() {
    let scratch = Scratch::new();
    for (claimed, file_length) in [
        (10_000_000_000, 64),
        (10_000_000_000, 11_000_000_000),
        (u64::MAX, 64),
        (u64::MAX - 7, 1 << 40),
        (100_000_000, 200_000_000),
        ((16 << 20) + 1, 200_000_000),
        (1 << 63, 64),
    ] {
        fs::write(scratch.path(), u64::to_le_bytes(claimed)).unwrap();
        File::options().write(true).open(scratch.path()).unwrap().set_len(file_length).unwrap();
        let error = frugal(|| SafetensorsFile::open(&scratch.path())).unwrap_err();
        assert!(matches!(error, ModelError::TooLarge { .. }), "{error}");
    }
    // Within the limit, but there is nothing in it.
    for start in [b"".as_slice(), b"{"] {
        fs::write(scratch.path(), [&u64::to_le_bytes(16 << 20), start].concat()).unwrap();
        File::options().write(true).open(scratch.path()).unwrap().set_len(200_000_000).unwrap();
        let error = frugal(|| SafetensorsFile::open(&scratch.path())).unwrap_err();
        assert!(matches!(error, ModelError::Safetensors { .. }), "{error}");
    }
}

/// Headers within the limit, made of as much of one thing as fits.
#[test]
fn headers_full_of_one_thing() {
    let long = "a".repeat((16 << 20) - 200);
    let escapes = "\\n".repeat((8 << 20) - 100);
    let digits = "9".repeat((16 << 20) - 200);
    let rest = r#""shape":[4],"data_offsets":[0,16]"#;
    let medium = "a".repeat(5000);
    let mut cases = vec![
        (format!(r#"{{"{medium}":{{"dtype":"F32",{rest}}}}}"#), "a name has 5000 bytes"),
        (format!(r#"{{"t":{{"{medium}":1,"dtype":"F32",{rest}}}}}"#), "a name has 5000 bytes"),
        (format!(r#"{{"t":{{"dtype":"{medium}",{rest}}}}}"#), "unknown type aaaaaaaaaaaaaaaa at"),
    ];
    for text in [&long, &escapes] {
        cases.push((format!(r#"{{"{text}":{{"dtype":"F32",{rest}}}}}"#), "more than 1048576"));
        cases.push((format!(r#"{{"t":{{"dtype":"{text}",{rest}}}}}"#), "more than 1048576"));
        cases.push((format!(r#"{{"t":{{"{text}":1,{rest}}}}}"#), "more than 1048576"));
        cases.push((format!(r#"{{"__metadata__":{{"a":"{text}"}}}}"#), "more than 1048576"));
    }
    for (value, expected) in [
        (digits.clone(), "more than 1048576"),
        (format!("-0.{digits}"), "more than 1048576"),
        (format!("1e{digits}"), "number out of range"),
    ] {
        let entry = format!(r#""dtype":"F32","shape":[{value}],"data_offsets":[0,16]"#);
        cases.push((format!("{{\"t\":{{{entry}}}}}"), expected));
    }
    let many = entries((1 << 17) + 1, "", "0");
    cases.push((many, "more than 131072 entries"));
    let scratch = Scratch::new();
    for (header, expected) in cases {
        let shown: String = header.chars().take(60).collect();
        let error = scratch.open(&file_bytes(header.as_bytes(), 16)).expect_err(&shown);
        assert!(matches!(error, ModelError::Safetensors { .. }), "{shown}: {error}");
        let message = error.to_string();
        assert!(message.contains(expected), "{shown}\n  says: {message}\n  lacks: {expected}");
        assert!(message.len() < 1000, "{message}");
    }
    // What is allowed: the most tensors, with names and shapes that fill the header.
    for (tail, shape) in [("", "0"), ("ab", "0,1,1,1,1,1,1,1"), (&medium[..55], "0,1,1,1,1,1,1,1")]
    {
        let header = entries(1 << 17, tail, shape);
        assert!(header.len() <= 16 << 20, "{}", header.len());
        let file = scratch.open(&file_bytes(header.as_bytes(), 0)).unwrap();
        assert_eq!(file.tensors().len(), 1 << 17);
    }
    // Long texts in the metadata are honest.
    let text = &long[..1_000_000];
    let header = format!(r#"{{"__metadata__":{{"a":"{text}"}},"t":{{"dtype":"F32",{rest}}}}}"#);
    assert_eq!(scratch.open(&file_bytes(header.as_bytes(), 16)).unwrap().tensors().len(), 1);
}

#[test]
fn memory_does_not_grow_with_the_tensor() {
    // 1 GB of bf16 zeros, sparse; read the last million elements.
    let scratch = Scratch::new();
    let header = br#"{"t":{"dtype":"BF16","shape":[500000000],"data_offsets":[0,1000000000]}}"#;
    fs::write(scratch.path(), file_bytes(header, 0)).unwrap();
    let length = 8 + header.len() as u64 + 1_000_000_000;
    File::options().write(true).open(scratch.path()).unwrap().set_len(length).unwrap();
    let file = SafetensorsFile::open(&scratch.path()).unwrap();
    let mut values = vec![1f32; 10_000_000];
    let (result, peak) =
        peak_bytes(|| file.read_elements("t", &file.tensors()["t"], 490_000_000, &mut values));
    result.unwrap();
    assert!(peak < 5 << 20, "allocated {peak} bytes");
    assert!(values.iter().all(|value| *value == 0.0));
}

#[test]
fn mutated_files_never_panic() {
    let scratch = Scratch::new();
    let honest = honest();
    let header_end = 8 + u64::from_le_bytes(*honest.first_chunk().unwrap()) as usize;
    let mut random = Random(2);
    let mut opened = 0;
    for _ in 0..3000 {
        let mut bytes = honest.clone();
        for _ in 0..=random.below(6) {
            let place = random.below(header_end);
            bytes[place] = match random.below(3) {
                0 => random.bits() as u8,
                1 => bytes[place] ^ (1 << random.below(8)),
                _ => b"0123456789-.{}[],:\""[random.below(19)],
            };
        }
        if random.below(8) == 0 {
            bytes.truncate(random.below(bytes.len()));
        }
        if let Ok(file) = scratch.open(&bytes) {
            opened += 1;
            for name in file.tensors().keys() {
                let _ = read_f32(&file, name);
            }
        }
    }
    // Letters of a tensor's name may change; most else must be refused.
    assert!(opened < 1500, "{opened} of 3000 opened");
}

#[test]
fn pickles_by_content() {
    let scratch = Scratch::new();
    let legacy = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.";
    let zip = [b"PK\x03\x04".as_slice(), &[0; 26], b"archive/data.pkl", &[0; 90]].concat();
    // The name of the pickle only in the directory at the end.
    let long_zip =
        [b"PK\x03\x04".as_slice(), &[0; 200_000], b"archive/data.pkl", &[0; 90]].concat();
    for bytes in [
        legacy.as_slice(),
        b"\x80\x02}q\x00.",
        b"\x80\x03}q\x00.",
        b"\x80\x04\x95",
        b"\x80\x05\x95\x00\x00\x00\x00\x00\x00\x00{",
        &zip,
        &long_zip,
    ] {
        let error = scratch.open(bytes).unwrap_err();
        assert!(matches!(error, ModelError::Pickle { .. }), "{error}");
        assert!(error.to_string().contains("save_pretrained"), "{error}");
    }
}

/// The length of this header, 640, is 80 02 in the file: what a pickle starts with.
#[test]
fn a_header_of_640_bytes_is_no_pickle() {
    let scratch = Scratch::new();
    for length in [0x280usize, 0x380, 0x480, 0x580] {
        let mut header = br#"{"t":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#.to_vec();
        header.resize(length, b' ');
        scratch.open(&file_bytes(&header, 16)).unwrap();
    }
}
