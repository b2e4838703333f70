//! Held-out pictures with what the model takes them for.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::io::{self, Write};
use storm_data::records::resize_image;
use storm_exec::trace::page::Escaped;

/// What a page says of pictures begins and ends with these.
const HEADING: &str = "<h2 id=\"pictures\">Pictures and what the model takes them for</h2>";
const END: &str = "<!-- end of the pictures -->";

/// The longest side of a picture on the page, in its own pixels.
const SIDE_MAX: usize = 64;

/// A picture of the held-out part.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// Its number there.
    pub number: u64,
    /// Height, width and channels.
    pub shape: [usize; 3],
    /// 8 bits each.
    pub pixels: Vec<u8>,
    /// What it shows.
    pub class: String,
    /// What the model takes it for.
    pub predicted: String,
    /// How likely that is, to the model.
    pub probability: f32,
}

/// What a page says of pictures.
#[derive(Clone, Debug, Default)]
pub enum Pictures {
    /// Nothing.
    #[default]
    None,
    /// These, after so many steps.
    Shown {
        /// Of the run.
        step: u64,
        /// In this order.
        pictures: Vec<Picture>,
    },
    /// What a page that was written before says of them, as it is.
    Page(String),
}

impl Pictures {
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        match self {
            Pictures::None => Ok(()),
            Pictures::Page(page) => match section(page) {
                Some(section) => writeln!(out, "{section}"),
                None => Ok(()),
            },
            Pictures::Shown { step, pictures } => write_grid(*step, pictures, out),
        }
    }
}

/// The part of a page about pictures.
fn section(page: &str) -> Option<&str> {
    let from = page.find(HEADING)?;
    let length = page[from..].find(END)? + END.len();
    Some(&page[from..from + length])
}

fn write_grid(step: u64, pictures: &[Picture], out: &mut impl Write) -> io::Result<()> {
    let right = pictures.iter().filter(|picture| picture.predicted == picture.class).count();
    writeln!(out, "{HEADING}")?;
    writeln!(
        out,
        "<p class=\"hint\">{} of the held-out part, chosen by the seed, after step {step}; {right} are right. Below each: \
         what the model takes it for and how sure it is. If that is wrong, it is marked, and the true class follows.</p>",
        pictures.len()
    )?;
    writeln!(out, "<ul class=\"pictures\">")?;
    for picture in pictures {
        write_picture(picture, out)?;
    }
    writeln!(out, "</ul>\n{END}")
}

fn write_picture(picture: &Picture, out: &mut impl Write) -> io::Result<()> {
    let Picture { number, class, predicted, probability, .. } = picture;
    let (class, predicted) = (Escaped(class), Escaped(predicted));
    let percent = 100.0 * probability;
    let data = STANDARD.encode(png(picture)?);
    let is_right = picture.predicted == picture.class;
    let (kind, truth) = match is_right {
        true => ("", String::new()),
        false => (" class=\"wrong\"", format!("<i>is {class}</i>")),
    };
    let mark = if is_right { "" } else { "✗ " };
    writeln!(
        out,
        "<li{kind}><img src=\"data:image/png;base64,{data}\" alt=\"picture {number}: {class}\"><b>{mark}{predicted}</b>\
         <span>{percent:.1} %</span>{truth}</li>"
    )
}

/// The picture as a PNG, with sides that fit the page.
fn png(picture: &Picture) -> io::Result<Vec<u8>> {
    let [height, width, channels] = picture.shape;
    let longest = height.max(width).max(1);
    let (mut sides, mut pixels) = ([height, width], picture.pixels.clone());
    if longest > SIDE_MAX {
        sides = sides.map(|side| (side * SIDE_MAX / longest).max(1));
        pixels = resize_image(pixels, picture.shape, sides);
    }
    // Of channels that are no colours, the first is shown.
    let colours = match channels {
        3 => png::ColorType::Rgb,
        _ => png::ColorType::Grayscale,
    };
    if channels != 3 {
        pixels = pixels.into_iter().step_by(channels.max(1)).collect();
    }
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, sides[1] as u32, sides[0] as u32);
    encoder.set_color(colours);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.write_header()?.write_image_data(&pixels)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "</ul><script>f()</script>\"'&";

    fn picture(shape: [usize; 3], class: &str, predicted: &str) -> Picture {
        let pixels = (0..shape.iter().product::<usize>()).map(|at| at as u8).collect();
        let (class, predicted) = (class.to_owned(), predicted.to_owned());
        Picture { number: 7, shape, pixels, class, predicted, probability: 0.25 }
    }

    fn written(pictures: &Pictures) -> String {
        let mut page = Vec::new();
        pictures.write(&mut page).expect("written");
        String::from_utf8(page).expect("text")
    }

    #[test]
    fn wrong_pictures_are_marked_and_names_are_text() {
        let pictures = vec![
            picture([4, 6, 3], "cat", "cat"),
            picture([4, 6, 1], HOSTILE, "dog"),
            picture([300, 100, 3], "a", "b"),
        ];
        let page = written(&Pictures::Shown { step: 9, pictures });
        assert_eq!(page.matches("<li>").count(), 1);
        assert_eq!(page.matches("<li class=\"wrong\">").count(), 2);
        assert!(page.contains("1 are right") && page.contains("25.0 %"), "{page}");
        assert!(!page.contains("<script>") && page.contains("&lt;script&gt;"), "{page}");
        assert!(page.len() < 40_000, "{}", page.len());
        // A page that is rebuilt has the same.
        let whole = format!("<h1>a</h1>{page}<h2>b</h2>");
        assert_eq!(written(&Pictures::Page(whole)), page);
        assert_eq!(written(&Pictures::Page("<h1>a</h1>".to_owned())), "");
    }

    #[test]
    fn pictures_are_their_pixels() {
        let small = picture([4, 6, 3], "a", "a");
        let decode = |picture: &Picture| {
            let bytes = png(picture).expect("written");
            let mut reader = png::Decoder::new(io::Cursor::new(bytes)).read_info().expect("a PNG");
            let mut pixels = vec![0; reader.output_buffer_size().expect("small")];
            let info = reader.next_frame(&mut pixels).expect("a frame");
            ([info.height, info.width], pixels)
        };
        assert_eq!(decode(&small), ([4, 6], small.pixels.clone()));
        assert_eq!(decode(&picture([300, 100, 3], "a", "a")).0, [64, 21]);
        let two = picture([2, 2, 2], "a", "a");
        assert_eq!(decode(&two), ([2, 2], vec![0, 2, 4, 6]));
    }
}
