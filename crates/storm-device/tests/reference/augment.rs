//! Changes of pictures: the padded picture is built, cut out, mirrored, normalized and given its hole, one after the other.

use super::Value;
use storm_graph::random::{Purpose, Seed, Stream, words};
use storm_graph::{Border, Flip, Op};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    let Op::Augment { images, samples, phase, settings, .. } = op else {
        unreachable!("not an image op")
    };
    let &[_, height, width, channels] = images.shape.axes() else { panic!("four axes") };
    let word = |x: f64| x as i32 as u32;
    let seed = u64::from(word(phase.data[1])) | u64::from(word(phase.data[2])) << 32;
    let mut data = Vec::new();
    for (image, sample) in images.data.chunks(height * width * channels).zip(samples.rows()) {
        let pixel = |row: usize, column: usize, channel: usize| {
            image[(row * width + column) * channels + channel]
        };
        let normal = |x: f64, channel: usize| {
            (x / 255.0 - f64::from(settings.mean[channel])) / f64::from(settings.deviation[channel])
        };
        let id = u64::from(word(sample[0])) | u64::from(word(sample[1])) << 32;
        let seed = Seed { seed, step: word(sample[2]) };
        let drawn = words(seed, Purpose::Augmentation, Stream { tensor: 0, layer: 0 }, id);
        let [flip, top, left, hole] = drawn.map(u64::from);
        let padding = settings.padding;
        let padded = |row: usize, column: usize, channel: usize| {
            let mirror = |at: usize, count: usize| match at {
                _ if at < padding => padding - at,
                _ if at >= padding + count => count - 2 - (at - padding - count),
                _ => at - padding,
            };
            let is_inside = (padding..padding + height).contains(&row)
                && (padding..padding + width).contains(&column);
            match settings.border {
                Border::Black if !is_inside => 0.0,
                _ => pixel(mirror(row, height), mirror(column, width), channel),
            }
        };
        let offset = |word: u64| (word * (2 * padding as u64 + 1) / (1 << 32)) as usize;
        let (top, left) = (offset(top), offset(left));
        let flips = settings.flip == Flip::Horizontal && flip >= 1 << 31;
        let hole = [
            ((hole >> 16) * height as u64 / 65536) as i64,
            ((hole & 0xffff) * width as u64 / 65536) as i64,
        ];
        let cutout = settings.cutout as i64;
        let is_cut = |at: usize, middle: i64| {
            let first = middle - cutout / 2;
            (first..first + cutout).contains(&(at as i64))
        };
        for row in 0..height {
            for column in 0..width {
                for channel in 0..channels {
                    data.push(if phase.data[0] == 0.0 {
                        normal(pixel(row, column, channel), channel)
                    } else if is_cut(row, hole[0]) && is_cut(column, hole[1]) {
                        0.0
                    } else {
                        let from = if flips { width - 1 - column } else { column };
                        normal(padded(row + top, from + left, channel), channel)
                    });
                }
            }
        }
    }
    vec![Value::new(images.shape.clone(), data)]
}
