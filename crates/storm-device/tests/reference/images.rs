//! Convolutions and pools: loops over every position of every window.

use super::Value;
use storm_graph::{Op, Shape, Window};

pub(super) fn evaluate(op: &Op<&Value>) -> Vec<Value> {
    let value = match *op {
        Op::Conv2d { x, weight, bias, window } => {
            let [outputs, channels] = [weight.shape.axes()[0], x.shape.axes()[3]];
            over_windows(x, window, outputs, |inside, output| {
                let mut sum = bias.map_or(0.0, |bias| bias.data[output]);
                for &(kh, kw, pixel) in inside {
                    let tap = (kh * window.kernel[1] + kw) * channels;
                    for channel in 0..channels {
                        let weight = weight.data[output * weight.shape.width() + tap + channel];
                        sum += weight * x.data[pixel * channels + channel];
                    }
                }
                sum
            })
        }
        Op::MaxPool { x, window } => {
            let channels = x.shape.axes()[3];
            over_windows(x, window, channels, |inside, channel| {
                let values = inside.iter().map(|&(_, _, pixel)| x.data[pixel * channels + channel]);
                values
                    .fold(f64::NEG_INFINITY, |a, b| if a.is_nan() { a } else { b.max(a) + 0.0 * b })
            })
        }
        Op::AveragePool { x, window } => {
            let channels = x.shape.axes()[3];
            let size = (window.kernel[0] * window.kernel[1]) as f64;
            over_windows(x, window, channels, |inside, channel| {
                let values = inside.iter().map(|&(_, _, pixel)| x.data[pixel * channels + channel]);
                values.sum::<f64>() / size
            })
        }
        _ => unreachable!("not an op of images"),
    };
    vec![value]
}

/// `each` output channel of each position of the window, given what lies inside: (kh, kw, pixel of the batch).
fn over_windows(
    x: &Value,
    window: Window,
    channels: usize,
    each: impl Fn(&[(usize, usize, usize)], usize) -> f64,
) -> Value {
    let &[images, height, width, _] = x.shape.axes() else { panic!("images have four axes") };
    let count = |extent: usize, axis: usize| {
        (extent + 2 * window.padding[axis] - window.kernel[axis]) / window.stride[axis] + 1
    };
    let (high, wide) = (count(height, 0), count(width, 1));
    let mut data = Vec::new();
    for image in 0..images {
        for oh in 0..high {
            for ow in 0..wide {
                let mut inside = Vec::new();
                for kh in 0..window.kernel[0] {
                    for kw in 0..window.kernel[1] {
                        let h = (oh * window.stride[0] + kh).wrapping_sub(window.padding[0]);
                        let w = (ow * window.stride[1] + kw).wrapping_sub(window.padding[1]);
                        if h < height && w < width {
                            inside.push((kh, kw, (image * height + h) * width + w));
                        }
                    }
                }
                data.extend((0..channels).map(|channel| each(&inside, channel)));
            }
        }
    }
    Value::new(Shape::from([images, high, wide, channels]), data)
}
