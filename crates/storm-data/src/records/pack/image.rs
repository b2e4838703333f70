//! Decodes PNG and JPEG files. They are untrusted, so their size is checked before decoding.

use crate::DataError;
use crate::manifest::read_file;
use std::io::Cursor;
use std::path::Path;
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;
use zune_jpeg::JpegDecoder;

/// Size limit of an image file.
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Limit on pixels. 48 MiB of RGB fit in a record.
const PIXELS_MAX: u64 = 16 << 20;
/// Limit on height and width.
const SIDE_MAX: usize = 1 << 16;
/// Allocation limit of the PNG decoder, besides the pixels.
const PNG_BYTES_MAX: usize = 64 << 20;
/// Limit on scans of a progressive JPEG. Encoders use about ten, and each takes time.
const JPEG_SCANS_MAX: usize = 64;

/// An image with 8 bits per channel: gray or RGB.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Image {
    pub(super) height: usize,
    pub(super) width: usize,
    pub(super) channels: usize,
    /// (height, width, channels)
    pub(super) pixels: Vec<u8>,
}

impl Image {
    pub(super) fn read(path: &Path) -> Result<Image, DataError> {
        let bytes = read_file(path, FILE_BYTES_MAX)?;
        let decoded = match &bytes[..] {
            [0x89, b'P', b'N', b'G', ..] => png(&bytes),
            [0xff, 0xd8, 0xff, ..] => jpeg(&bytes),
            _ => Err("it is neither PNG nor JPEG".to_owned()),
        };
        decoded.map_err(|problem| DataError::input(path, problem))
    }

    /// The same image in RGB.
    pub(super) fn into_rgb(self) -> Image {
        match self.channels {
            1 => Image {
                channels: 3,
                pixels: self.pixels.iter().flat_map(|&gray| [gray; 3]).collect(),
                ..self
            },
            _ => self,
        }
    }

    pub(super) fn words(&self) -> String {
        let colors = if self.channels == 1 { "gray" } else { "color" };
        format!("{} × {} in {colors}", self.width, self.height)
    }
}

fn check_size(width: usize, height: usize) -> Result<(), String> {
    let pixels = width as u64 * height as u64;
    match pixels > 0 && pixels <= PIXELS_MAX && width.max(height) <= SIDE_MAX {
        true => Ok(()),
        false => Err(format!("an image of {width} × {height} pixels is too large to be packed")),
    }
}

fn png(bytes: &[u8]) -> Result<Image, String> {
    let words = |error: png::DecodingError| format!("the PNG cannot be decoded: {error}");
    let limits = png::Limits { bytes: PNG_BYTES_MAX };
    let mut decoder = png::Decoder::new_with_limits(Cursor::new(bytes), limits);
    decoder.set_ignore_text_chunk(true);
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let header = decoder.read_header_info().map_err(words)?;
    check_size(header.width as usize, header.height as usize)?;
    let mut reader = decoder.read_info().map_err(words)?;
    let length = reader.output_buffer_size().ok_or("the PNG is too large")?;
    let mut pixels = vec![0; length];
    let frame = reader.next_frame(&mut pixels).map_err(words)?;
    pixels.truncate(frame.buffer_size());
    let (height, width) = (frame.height as usize, frame.width as usize);
    let (channels, pixels) = match frame.color_type {
        png::ColorType::Grayscale => (1, pixels),
        png::ColorType::GrayscaleAlpha => (1, without_alpha(&pixels, 2)),
        png::ColorType::Rgb => (3, pixels),
        png::ColorType::Rgba => (3, without_alpha(&pixels, 4)),
        png::ColorType::Indexed => return Err("the PNG has a palette without colors".to_owned()),
    };
    whole(Image { height, width, channels, pixels })
}

fn without_alpha(pixels: &[u8], channels: usize) -> Vec<u8> {
    pixels.chunks_exact(channels).flat_map(|pixel| &pixel[..channels - 1]).copied().collect()
}

fn jpeg(bytes: &[u8]) -> Result<Image, String> {
    let words =
        |error: zune_jpeg::errors::DecodeErrors| format!("the JPEG cannot be decoded: {error}");
    let options = DecoderOptions::default()
        .set_strict_mode(true)
        .set_max_width(SIDE_MAX)
        .set_max_height(SIDE_MAX)
        .jpeg_set_max_scans(JPEG_SCANS_MAX);
    let mut decoder = JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    decoder.decode_headers().map_err(words)?;
    let info = decoder.info().ok_or("the JPEG has no header")?;
    let (height, width) = (usize::from(info.height), usize::from(info.width));
    check_size(width, height)?;
    let (channels, colors) = match decoder.input_colorspace() {
        Some(ColorSpace::Luma) => (1, ColorSpace::Luma),
        _ => (3, ColorSpace::RGB),
    };
    decoder.set_options(options.jpeg_set_out_colorspace(colors));
    let pixels = decoder.decode().map_err(words)?;
    whole(Image { height, width, channels, pixels })
}

fn whole(image: Image) -> Result<Image, String> {
    match image.pixels.len() == image.height * image.width * image.channels {
        true => Ok(image),
        false => Err("it has fewer pixels than its header says".to_owned()),
    }
}
