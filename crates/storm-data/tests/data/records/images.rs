//! Packing images: CIFAR-10, IDX, folders of PNG and JPEG.

use super::options;
use crate::containers::damage;
use sha2::{Digest, Sha256};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use storm_data::records::{
    Codec, RecordBatch, RecordInput, RecordLoader, RecordLoaderOptions, RecordPackOptions,
    RecordPackSummary, RecordSet, pack_records, resize_image,
};
use storm_data::{DataError, Split};
use storm_graph::random::Random;
use storm_host::allocation::peak_bytes;
use tempfile::TempDir;

/// More than any of these images needs, and far less than a bomb declares.
const MEMORY_MAX: isize = 16 << 20;

struct Scene {
    folder: TempDir,
}

impl Scene {
    fn new() -> Scene {
        Scene { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        fs::create_dir_all(self.path(name).parent().unwrap()).unwrap();
        fs::write(self.path(name), bytes).unwrap();
    }

    fn options(&self) -> RecordPackOptions {
        let input = RecordInput::recognize(&[self.path("in")]).unwrap().unwrap();
        RecordPackOptions { held_out: 0.0, ..options(input, &self.path("out"), Codec::Zstd) }
    }

    /// Packs the folder `in`.
    fn pack(&self) -> Result<RecordPackSummary, DataError> {
        self.try_pack(&self.options())
    }

    fn try_pack(&self, options: &RecordPackOptions) -> Result<RecordPackSummary, DataError> {
        let (result, peak) = peak_bytes(|| pack_records(options, &|_| {}));
        assert!(peak < MEMORY_MAX, "{peak} bytes");
        assert_eq!(result.is_ok(), options.out.exists(), "complete or absent");
        result
    }

    /// What is wrong with the input.
    fn refusal(&self) -> String {
        let error = self.pack().unwrap_err();
        assert!(matches!(error, DataError::Input { .. }), "{error:?}");
        error.to_string()
    }

    /// All records of a part in order: pixels and class.
    fn records(&self, part: Split) -> Vec<(Vec<u8>, i32)> {
        let set = Arc::new(RecordSet::open(&self.path("out")).unwrap());
        if set.records(part) == 0 {
            return Vec::new();
        }
        let options = RecordLoaderOptions { part, ..RecordLoaderOptions::evaluation(3, 32 << 20) };
        let mut loader = RecordLoader::new(set, options).unwrap();
        let (mut all, mut batch) = (Vec::new(), RecordBatch::default());
        loop {
            let rows = loader.next_batch(&mut batch).unwrap();
            if rows == 0 {
                return all;
            }
            let targets = batch.column("targets").unwrap().to_i32().unwrap();
            let images = batch.column("images").unwrap();
            all.extend((0..rows).map(|row| (images.row(row).to_vec(), targets[row])));
        }
    }
}

#[test]
fn cifar_files_become_channels_last() {
    let scene = Scene::new();
    let image = |label: u8| {
        let planes = (0..3072u32).map(|at| (at / 1024 * 50 + at % 50) as u8);
        [label].into_iter().chain(planes).collect::<Vec<u8>>()
    };
    scene.write("in/data_batch_1.bin", &[image(3), image(9)].concat());
    scene.write("in/data_batch_4.bin", &image(0));
    scene.write("in/test_batch.bin", &image(5));
    scene.write("in/batches.meta.txt", b"a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n\n");
    let summary = scene.pack().unwrap();
    assert_eq!(summary.manifest.class_names.len(), 10);
    let expected: Vec<u8> = (0..1024u32)
        .flat_map(|at| {
            [0, 1, 2].map(|c| ((c * 1024 + at) / 1024 * 50 + (c * 1024 + at) % 50) as u8)
        })
        .collect();
    let labels = |part| -> Vec<i32> {
        let check = |(pixels, label): (Vec<u8>, i32)| {
            assert!(pixels == expected);
            label
        };
        scene.records(part).into_iter().map(check).collect()
    };
    assert_eq!((labels(Split::Train), labels(Split::Held)), (vec![3, 9, 0], vec![5]));
}

#[test]
fn bad_cifar_files_are_refused_or_skipped() {
    let scene = Scene::new();
    scene.write("in/data_batch_1.bin", &[0; 3072]);
    assert!(scene.refusal().contains("not a number of images"));
    let mut bytes = vec![0; 3 * 3073];
    bytes[3073] = 10;
    scene.write("in/data_batch_1.bin", &bytes);
    assert!(scene.refusal().contains("image 1: targets 10 is not below 10"), "{}", scene.refusal());
    let options = RecordPackOptions { skip_bad: true, ..scene.options() };
    let summary = scene.try_pack(&options).unwrap();
    assert_eq!((summary.manifest.counts.records, summary.manifest.counts.skipped), (2, 1));
    assert!(summary.first_skipped.unwrap().contains("image 1"));
}

fn idx(dimensions: &[u32], bytes: &[u8]) -> Vec<u8> {
    let mut all = vec![0, 0, 8, dimensions.len() as u8];
    all.extend(dimensions.iter().flat_map(|length| length.to_be_bytes()));
    all.extend(bytes);
    all
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn idx_files_are_read_as_they_are_and_in_gzip() {
    let scene = Scene::new();
    let pixels: Vec<u8> = (0..24).collect();
    scene.write("in/train-images-idx3-ubyte.gz", &gzip(&idx(&[4, 2, 3], &pixels)));
    scene.write("in/train-labels-idx1-ubyte.gz", &gzip(&idx(&[4], &[9, 8, 7, 6])));
    scene.write("in/t10k-images-idx3-ubyte", &idx(&[1, 2, 3], &pixels[..6]));
    scene.write("in/t10k-labels-idx1-ubyte", &idx(&[1], &[1]));
    let summary = scene.pack().unwrap();
    assert_eq!(summary.manifest.columns[0].shape, [2, 3, 1]);
    let labels: Vec<i32> = scene.records(Split::Train).iter().map(|(_, label)| *label).collect();
    assert_eq!(labels, [9, 8, 7, 6]);
    assert_eq!(scene.records(Split::Held), [((0..6).collect(), 1)]);
}

#[test]
fn bad_idx_files_are_refused() {
    let scene = Scene::new();
    let images = idx(&[2, 2, 3], &[0; 12]);
    scene.write("in/train-labels-idx1-ubyte", &idx(&[2], &[0, 1]));
    for (bytes, problem) in [
        (images[..20].to_vec(), "not its length"),
        (images[..10].to_vec(), "ends before"),
        (idx(&[2, 1 << 20, 1 << 20], &[]), "cannot be packed"),
        (idx(&[3, 2, 3], &[0; 18]), "2 labels of 3 images"),
        (vec![1; 40], "not in the IDX format"),
    ] {
        scene.write("in/train-images-idx3-ubyte", &bytes);
        let refusal = scene.refusal();
        assert!(refusal.contains(problem), "{refusal}");
    }
    fs::remove_file(scene.path("in/train-images-idx3-ubyte")).unwrap();
    for (bytes, problem) in [
        (gzip(&idx(&[u32::MAX, 1000, 1000], &[0; 1 << 20])), "not its length"),
        (gzip(&images)[..20].to_vec(), "ends before"),
        (gzip(&[&images[..], &[0]].concat()), "goes on"),
        (b"not gzip at all, in many bytes".to_vec(), "damaged"),
    ] {
        scene.write("in/train-images-idx3-ubyte.gz", &bytes);
        let refusal = scene.refusal();
        assert!(refusal.contains(problem), "{refusal}");
    }
}

fn png(width: u32, height: u32, colours: png::ColorType, pixels: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, width, height);
    encoder.set_color(colours);
    encoder.write_header().unwrap().write_image_data(pixels).unwrap();
    bytes
}

/// A grey JPEG of the middle value: every block is a DC difference of zero and an end, each of one bit.
fn jpeg(width: u16, height: u16) -> Vec<u8> {
    let mut bytes = vec![0xff, 0xd8, 0xff, 0xdb, 0, 67, 0];
    bytes.extend([1; 64]);
    bytes.extend([0xff, 0xc0, 0, 11, 8]);
    bytes.extend(height.to_be_bytes());
    bytes.extend(width.to_be_bytes());
    bytes.extend([1, 1, 0x11, 0]);
    for class in [0x00, 0x10] {
        bytes.extend([0xff, 0xc4, 0, 20, class, 1]);
        bytes.extend([0; 15]);
        bytes.push(0);
    }
    bytes.extend([0xff, 0xda, 0, 8, 1, 1, 0, 0, 63, 0]);
    let blocks = usize::from(width.div_ceil(8)) * usize::from(height.div_ceil(8));
    bytes.extend(vec![0; blocks.min(1 << 16) / 4]);
    bytes.extend([0x3f, 0xff, 0xd9]);
    bytes
}

#[test]
fn folders_of_images_are_classes() {
    let scene = Scene::new();
    let colour: Vec<u8> = (0..192).collect();
    scene.write("in/dogs/a.png", &png(8, 8, png::ColorType::Rgb, &colour));
    scene.write("in/dogs/b.jpg", &jpeg(8, 8));
    scene.write("in/cats/c.png", &png(8, 8, png::ColorType::GrayscaleAlpha, &[7; 128]));
    scene.write("in/cats/d.png", &png(8, 8, png::ColorType::Rgba, &[9; 256]));
    scene.write("in/.hidden/e.txt", b"hidden");
    // The first image is grey, in the order of names: a colour one does not fit.
    assert!(scene.refusal().contains("8 × 8 in color"), "{}", scene.refusal());
    scene.write("in/cats/b.png", &png(8, 8, png::ColorType::Rgb, &[1; 192]));
    let summary = scene.pack().unwrap();
    assert_eq!(summary.manifest.class_names, ["cats", "dogs"]);
    assert_eq!(summary.manifest.columns[0].shape, [8, 8, 3]);
    let records = scene.records(Split::Train);
    let expected: [(&[u8], i32); 5] =
        [(&[1; 192], 0), (&[7; 192], 0), (&[9; 192], 0), (&colour, 1), (&[128; 192], 1)];
    assert!(records.iter().map(|(pixels, label)| (&pixels[..], *label)).eq(expected));
}

#[test]
fn folders_may_have_parts() {
    let scene = Scene::new();
    let image = |value| png(2, 1, png::ColorType::Grayscale, &[value; 2]);
    for (name, value) in [("train/x", 1), ("train/y", 2), ("test/y", 3), ("test/z", 4)] {
        scene.write(&format!("in/{name}/i.png"), &image(value));
    }
    assert_eq!(scene.pack().unwrap().manifest.class_names, ["x", "y", "z"]);
    assert_eq!(scene.records(Split::Train), [(vec![1, 1], 0), (vec![2, 2], 1)]);
    assert_eq!(scene.records(Split::Held), [(vec![3, 3], 1), (vec![4, 4], 2)]);
    let options = RecordPackOptions { held_out: 0.5, ..scene.options() };
    assert!(matches!(pack_records(&options, &|_| {}), Err(DataError::Option { .. })));
}

/// A PNG whose header declares a size, with a right checksum and hardly any data.
fn png_bomb(side: u32) -> Vec<u8> {
    let mut bytes = png(1, 1, png::ColorType::Rgb, &[0; 3]);
    bytes[16..20].copy_from_slice(&side.to_be_bytes());
    bytes[20..24].copy_from_slice(&side.to_be_bytes());
    let checksum = crc32fast::hash(&bytes[12..29]);
    bytes[29..33].copy_from_slice(&checksum.to_be_bytes());
    bytes
}

#[test]
fn bad_images_are_refused_or_skipped() {
    let whole = jpeg(64, 64);
    let cases: [(&str, Vec<u8>, &str); 7] = [
        ("bomb.png", png_bomb(31_623), "too large"),
        ("bomb.jpg", jpeg(60_000, 60_000), "too large"),
        ("cut.jpg", whole[..whole.len() - 10].to_vec(), "cannot be decoded"),
        ("head.jpg", whole[..30].to_vec(), "cannot be decoded"),
        ("cut.png", png(64, 64, png::ColorType::Rgb, &[5; 12288])[..60].to_vec(), "decoded"),
        ("other.png", png(8, 9, png::ColorType::Rgb, &[5; 216]), "give --size 64x64"),
        ("text.png", b"hello".to_vec(), "neither PNG nor JPEG"),
    ];
    for (name, bytes, problem) in cases {
        let scene = Scene::new();
        scene.write("in/class/a.png", &png(64, 64, png::ColorType::Rgb, &[5; 12288]));
        scene.write(&format!("in/class/{name}"), &bytes);
        let refusal = scene.refusal();
        assert!(refusal.contains(problem) && refusal.contains(name), "{refusal}");
        let options = RecordPackOptions { skip_bad: true, ..scene.options() };
        let summary = scene.try_pack(&options).unwrap();
        assert_eq!((summary.manifest.counts.records, summary.manifest.counts.skipped), (1, 1));
        // Alone there is nothing left.
        fs::remove_file(scene.path("in/class/a.png")).unwrap();
        fs::remove_dir_all(scene.path("out")).unwrap();
        if problem != "give --size 64x64" {
            let error = scene.try_pack(&options).unwrap_err().to_string();
            assert!(error.contains("none of its images"), "{error}");
        }
    }
}

#[test]
fn folders_with_nothing_in_them_are_refused() {
    let scene = Scene::new();
    fs::create_dir_all(scene.path("in/class")).unwrap();
    assert_eq!(RecordInput::recognize(&[scene.path("in")]).unwrap(), None);
    let input = RecordInput::ImageFolder(scene.path("in"));
    let options = options(input, &scene.path("out"), Codec::None);
    let refusal = || pack_records(&options, &|_| {}).unwrap_err().to_string();
    assert!(refusal().contains("no images"));
    fs::remove_dir(scene.path("in/class")).unwrap();
    assert!(refusal().contains("holds nothing"));
    // Images are told by their first bytes if nothing has a name.
    scene.write("in/class/image", &png(1, 1, png::ColorType::Rgb, &[0; 3]));
    let two = [scene.path("in"), Path::new("x").to_owned()];
    assert!(RecordInput::recognize(&two).is_err());
    assert_eq!(RecordInput::recognize(&two[1..]).unwrap(), None);
}

/// Pixels that are neither smooth nor the same twice.
fn pattern([height, width, channels]: [usize; 3]) -> Vec<u8> {
    (0..height * width * channels).map(|at| ((at * at * 31 + at * 7) >> 3) as u8).collect()
}

/// Hashes are those of Pillow 13.0.0 on the same pixels, with `Image.BILINEAR` to the new width and then to the new height.
#[test]
fn resizing_gives_the_bits_of_pillow() {
    let small = resize_image(pattern([5, 7, 1]), [5, 7, 1], [2, 3]);
    assert_eq!(small, [109, 117, 118, 149, 155, 114]);
    let cases: [([usize; 3], [usize; 2], &str); 7] = [
        ([5, 7, 3], [3, 4], "bb77f200fddd7973"),
        ([5, 7, 1], [9, 10], "b3b4c66b09a40b9e"),
        ([61, 47, 3], [32, 32], "8328f933d41006cd"),
        ([200, 3, 1], [7, 64], "1efea7ba413911eb"),
        ([33, 500, 3], [224, 224], "5e034fa07b17a251"),
        ([8, 8, 3], [8, 3], "dd1c07654bbb5b41"),
        ([8, 8, 1], [1, 1], "a5ab782c805e8bfb"),
    ];
    for (shape, size, hash) in cases {
        let pixels = resize_image(pattern(shape), shape, size);
        let digest: String =
            Sha256::digest(&pixels).iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, hash, "{shape:?} to {size:?}");
    }
}

#[test]
fn images_of_other_sizes_are_resized_if_asked_for() {
    let scene = Scene::new();
    let image = |[height, width, channels]: [usize; 3]| {
        let colours = if channels == 3 { png::ColorType::Rgb } else { png::ColorType::Grayscale };
        png(width as u32, height as u32, colours, &pattern([height, width, channels]))
    };
    for (name, shape) in [("a", [6, 4, 3]), ("b", [9, 5, 3]), ("c", [9, 5, 1])] {
        scene.write(&format!("in/class/{name}.png"), &image(shape));
    }
    let refusal = scene.refusal();
    assert!(refusal.contains("b.png") && refusal.contains("give --size 6x4"), "{refusal}");
    let grey: Vec<u8> = pattern([9, 5, 1]).iter().flat_map(|&value| [value; 3]).collect();
    for size in [[6, 4], [3, 8]] {
        let options = RecordPackOptions { size: Some(size), ..scene.options() };
        let summary = scene.try_pack(&options).unwrap();
        assert_eq!(summary.manifest.columns[0].shape, [size[0], size[1], 3]);
        let resized =
            |pixels: Vec<u8>, height, width| resize_image(pixels, [height, width, 3], size);
        let first = pattern([6, 4, 3]);
        let expected = [
            if size == [6, 4] { first } else { resized(first, 6, 4) },
            resized(pattern([9, 5, 3]), 9, 5),
            resized(grey.clone(), 9, 5),
        ];
        assert!(scene.records(Split::Train).into_iter().map(|(pixels, _)| pixels).eq(expected));
        fs::remove_dir_all(scene.path("out")).unwrap();
    }
    for size in [[0, 4], [4, 5000]] {
        let options = RecordPackOptions { size: Some(size), ..scene.options() };
        let error = pack_records(&options, &|_| {}).unwrap_err();
        assert!(matches!(error, DataError::Option { option: "--size", .. }), "{error:?}");
    }
    scene.write("cifar/data_batch_1.bin", &[0; 3073]);
    let input = RecordInput::recognize(&[scene.path("cifar")]).unwrap().unwrap();
    let options = RecordPackOptions { input, size: Some([4, 4]), ..scene.options() };
    let error = pack_records(&options, &|_| {}).unwrap_err();
    assert!(matches!(error, DataError::Option { option: "--size", .. }), "{error:?}");
}

#[test]
fn statistics_are_those_of_the_training_part() {
    let scene = Scene::new();
    let image = |pixels: &[u8]| png(2, 1, png::ColorType::Rgb, pixels);
    scene.write("in/train/x/a.png", &image(&[0, 10, 200, 50, 10, 0]));
    scene.write("in/train/y/b.png", &image(&[100, 10, 0, 50, 10, 0]));
    scene.write("in/test/x/c.png", &image(&[255; 6]));
    let manifest = scene.pack().unwrap().manifest;
    assert!(!manifest.is_cifar10());
    let statistics = manifest.statistics.unwrap();
    assert_eq!((statistics.pixels, &statistics.sums[..]), (4, &[200, 40, 200][..]));
    assert_eq!(statistics.squares, [15_000, 400, 40_000]);
    assert_eq!(statistics.mean(), [50.0 / 255.0, 10.0 / 255.0, 50.0 / 255.0]);
    let expected = [1250f64.sqrt() / 255.0, 0.0, 7500f64.sqrt() / 255.0];
    let deviations = statistics.standard_deviation();
    assert!(deviations.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-15), "{deviations:?}");
    // What was read back is the same, and sums that cannot be are refused.
    let read = RecordSet::open(&scene.path("out")).unwrap();
    assert_eq!(read.manifest().statistics.as_ref(), Some(&statistics));
    super::damage::rewrite(&scene.path("out"), |json| {
        json["statistics"]["sums"] = serde_json::json!([200, 40, 2000]);
    });
    let error = RecordSet::open(&scene.path("out")).unwrap_err();
    assert!(error.to_string().contains("statistics that no images have"), "{error}");
    // Datasets of before have none.
    super::damage::rewrite(&scene.path("out"), |json| {
        json.as_object_mut().unwrap().remove("statistics");
    });
    assert_eq!(RecordSet::open(&scene.path("out")).unwrap().manifest().statistics, None);
}

#[test]
fn damaged_images_are_errors_and_nothing_else() {
    let pixels = pattern([48, 40, 3]);
    let files = [("b.png", png(40, 48, png::ColorType::Rgb, &pixels)), ("b.jpg", jpeg(40, 48))];
    let mut random = Random(13);
    let mut skipped = 0;
    for (name, whole) in files {
        let scene = Scene::new();
        scene.write("in/class/a.png", &png(40, 48, png::ColorType::Rgb, &pixels));
        for _ in 0..150 {
            scene.write(&format!("in/class/{name}"), &damage(&whole, &mut random));
            let options =
                RecordPackOptions { skip_bad: true, size: Some([8, 8]), ..scene.options() };
            let counts = scene.try_pack(&options).unwrap().manifest.counts;
            assert_eq!(counts.records + counts.skipped, 2);
            skipped += counts.skipped;
            fs::remove_dir_all(scene.path("out")).unwrap();
        }
    }
    assert!((200..300).contains(&skipped), "{skipped}");
}
