//! Held-out images with the model's guesses.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::io::{self, Write};
use storm_data::records::resize_image;
use storm_exec::trace::page::Escaped;

/// Start and end of the images' section of a page.
const HEADING: &str = "<h2 id=\"pictures\">Pictures and what the model takes them for</h2>";
const END: &str = "<!-- end of the pictures -->";

/// Longest side of an image on the page, in image pixels.
const SIDE_MAX: usize = 64;

/// A held-out image with the model's guess.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// Its index in the held-out part.
    pub number: u64,
    /// Height, width and channels.
    pub shape: [usize; 3],
    /// 8 bits per channel.
    pub pixels: Vec<u8>,
    /// Its true class.
    pub class: String,
    /// The predicted class.
    pub predicted: String,
    /// The model's probability of that class.
    pub probability: f32,
}

/// The images to show.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shown {
    /// The training step of the guesses.
    pub step: u64,
    /// The images, in display order.
    pub pictures: Vec<Picture>,
    /// Guesses for the first of them after earlier steps: class and probability.
    pub views: Vec<(u64, Vec<(String, f32)>)>,
}

/// The images' section of a page.
#[derive(Clone, Debug, Default)]
pub enum Pictures {
    /// No section.
    #[default]
    None,
    /// New images.
    Shown(Shown),
    /// The section of an earlier page, copied.
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
            Pictures::Shown(shown) => {
                write_grid(shown, out)?;
                write_views(shown, out)?;
                writeln!(out, "{END}")
            }
        }
    }
}

/// Finds the images' section of a page.
fn section(page: &str) -> Option<&str> {
    let from = page.find(HEADING)?;
    let length = page[from..].find(END)? + END.len();
    Some(&page[from..from + length])
}

fn write_grid(shown: &Shown, out: &mut impl Write) -> io::Result<()> {
    let Shown { step, pictures, .. } = shown;
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
    writeln!(out, "</ul>")
}

fn write_picture(picture: &Picture, out: &mut impl Write) -> io::Result<()> {
    let Picture { number, class, predicted, probability, .. } = picture;
    let is_right = predicted == class;
    let class = Escaped(class);
    let data = STANDARD.encode(png(picture)?);
    let truth = if is_right { String::new() } else { format!("<i>is {class}</i>") };
    let image =
        format!("<img src=\"data:image/png;base64,{data}\" alt=\"picture {number}: {class}\">");
    write_guess(&image, is_right, predicted, *probability, &truth, out)
}

/// Writes an image with the model's guess; `image` and `truth` are HTML.
fn write_guess(
    image: &str,
    is_right: bool,
    predicted: &str,
    probability: f32,
    truth: &str,
    out: &mut impl Write,
) -> io::Result<()> {
    let kind = if is_right { "" } else { " class=\"wrong\"" };
    let mark = if is_right { "" } else { "✗ " };
    let (predicted, percent) = (Escaped(predicted), 100.0 * probability);
    writeln!(
        out,
        "<li{kind}>{image}<b>{mark}{predicted}</b><span>{percent:.1} %</span>{truth}</li>"
    )
}

/// Writes the guesses after earlier steps, one row each. Each image is embedded once, as a CSS class.
fn write_views(shown: &Shown, out: &mut impl Write) -> io::Result<()> {
    let Shown { pictures, views, .. } = shown;
    let count = views.iter().map(|(_, guesses)| guesses.len()).max().unwrap_or(0);
    let pictures = &pictures[..count.min(pictures.len())];
    if pictures.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "<details class=\"views\"><summary>After earlier evaluations</summary>\n<style>"
    )?;
    for (index, picture) in pictures.iter().enumerate() {
        let data = STANDARD.encode(png(picture)?);
        writeln!(
            out,
            ".views .view-{index} {{ background-image: url(data:image/png;base64,{data}); }}"
        )?;
    }
    writeln!(out, "</style>")?;
    for (step, guesses) in views {
        let of = || pictures.iter().zip(guesses);
        let right = of().filter(|(picture, (predicted, _))| *predicted == picture.class).count();
        let count = of().count();
        writeln!(
            out,
            "<h3>Step {step}: {right} of {count} are right</h3>\n<ul class=\"pictures\">"
        )?;
        for (index, (picture, (predicted, probability))) in of().enumerate() {
            let Picture { number, class, .. } = picture;
            let image = format!(
                "<span class=\"thumb view-{index}\" role=\"img\" aria-label=\"picture {number}: {}\"></span>",
                Escaped(class)
            );
            write_guess(&image, predicted == class, predicted, *probability, "", out)?;
        }
        writeln!(out, "</ul>")?;
    }
    writeln!(out, "</details>")
}

/// Encodes the image as a PNG, scaled down to fit the page.
fn png(picture: &Picture) -> io::Result<Vec<u8>> {
    let [height, width, channels] = picture.shape;
    let longest = height.max(width).max(1);
    let (mut sides, mut pixels) = ([height, width], picture.pixels.clone());
    if longest > SIDE_MAX {
        sides = sides.map(|side| (side * SIDE_MAX / longest).max(1));
        pixels = resize_image(pixels, picture.shape, sides);
    }
    // If the channels are not gray or RGB, show the first one.
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
        let page = written(&Pictures::Shown(Shown { step: 9, pictures, views: Vec::new() }));
        assert!(!page.contains("<details"), "{page}");
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
    fn earlier_views_have_a_row_each_and_the_bytes_of_a_picture_once() {
        let pictures: Vec<Picture> =
            ["cat", HOSTILE, "dog"].map(|class| picture([32, 32, 3], class, class)).into();
        let guess = |name: &str, probability: f32| (name.to_owned(), probability);
        let views = vec![
            (3, vec![guess("dog", 0.5), guess(HOSTILE, 0.75)]),
            // Metrics that a stranger wrote may have more of them.
            (6, ["cat", "b", "dog", "e"].map(|name| guess(name, 0.125)).into()),
        ];
        let shown = Shown { step: 9, pictures, views };
        let page = written(&Pictures::Shown(shown.clone()));
        let alone = written(&Pictures::Shown(Shown { views: Vec::new(), ..shown.clone() }));
        let (before, views) = page.split_once("<details").expect("views");
        assert_eq!(format!("{before}{END}\n"), alone);
        assert!(views.contains("Step 3: 1 of 2 are right") && views.contains("Step 6: 2 of 3 are"));
        assert_eq!((views.matches("<li>").count(), views.matches("<li class").count()), (3, 2));
        assert_eq!(views.matches("data:image/png").count(), 3);
        assert!(views.contains("50.0 %") && views.contains("12.5 %"), "{views}");
        assert!(!views.contains("<script>") && !views.contains("<img"), "{views}");
        let whole = format!("<h1>a</h1>{page}<h2>b</h2>");
        assert_eq!(written(&Pictures::Page(whole)), page);
        // No picture, no views.
        let none = written(&Pictures::Shown(Shown { pictures: Vec::new(), ..shown }));
        assert!(!none.contains("<details"), "{none}");
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
