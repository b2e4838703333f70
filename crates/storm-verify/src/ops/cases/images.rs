//! Convolutions and pooling.

use super::Builder;
use storm_graph::{GraphError, Op, Planes, Shape, Window};

impl Builder {
    /// A random window that fits its plane, with or without padding. It need not divide the plane
    /// evenly.
    fn window(&mut self) -> ([usize; 2], Window) {
        loop {
            let mut pick =
                |choices: &[usize]| [self.random.pick(choices), self.random.pick(choices)];
            let (plane, kernel) = (pick(&[1, 4, 5, 7, 8, 13, 16]), pick(&[1, 2, 3, 3, 5]));
            let (stride, padding) = (pick(&[1, 1, 2, 3]), pick(&[0, 0, 1, 2]));
            let window = Window { kernel, stride, padding };
            if window.positions(plane).is_ok() {
                return (plane, window);
            }
        }
    }

    /// Windows used by common networks and random ones, over channel counts that fill vector packs
    /// and that do not.
    pub(super) fn convolution(&mut self) -> Result<(), GraphError> {
        let images = self.random.pick(&[1, 3, 8, 17]);
        let plane = self.random.pick(&[5, 8, 13]);
        let square =
            |kernel, stride, padding| ([plane; 2], Window::square(kernel, stride, padding));
        for (name, (plane, window), channels) in [
            ("first", square(3, 1, 1), 3),
            ("same", square(3, 1, 1), 16),
            ("halved", square(3, 2, 1), 24),
            ("unpadded", square(3, 1, 0), 8),
            ("pointwise", square(1, 1, 0), 20),
            ("projection", square(1, 2, 0), 8),
            ("any", self.window(), self.random.pick(&[1, 3, 7, 8, 12, 32])),
        ] {
            self.convolve(name, [images, plane[0], plane[1], channels], window)?;
        }
        // Columns that take several chunks, in f32 and in bf16.
        if self.random.below(4) == 0 {
            self.convolve("chunks", [9, 64, 64, 32], Window::square(3, 1, 1))?;
        }
        self.residual(images, plane)
    }

    fn convolve(
        &mut self,
        name: &str,
        input: [usize; 4],
        window: Window,
    ) -> Result<(), GraphError> {
        let outputs = match name {
            "chunks" => 4,
            _ => self.random.pick(&[1, 5, 8, 16, 33]),
        };
        let x = self.input(&format!("{name} x"), &input);
        let shape = [outputs, window.taps() * input[3]];
        let weight = self.parameter(&format!("{name} weight"), &shape);
        let bias = self.maybe_parameter(&format!("{name} bias"), &[outputs]);
        self.result(name, Op::Conv2d { x, weight, bias, window }).map(drop)
    }

    /// A sum of `x` and its convolution, so the convolution's backward pass accumulates into the
    /// gradient of `x`.
    fn residual(&mut self, images: usize, plane: usize) -> Result<(), GraphError> {
        let channels = self.random.pick(&[3, 8]);
        let x = self.input("x", &[images, plane, plane, channels]);
        for (kernel, padding) in [(3, 1), (1, 0)] {
            let weight = self.parameter("weight", &[channels, kernel * kernel * channels]);
            let window = Window::square(kernel, 1, padding);
            let branch = self.apply("branch", Op::Conv2d { x, weight, bias: None, window })?[0];
            self.result("sum", Op::Add { a: branch, b: x })?;
        }
        // Convolutions of the same images, whose gradients overwrite each other.
        let channels = self.random.pick(&[8, 64]);
        let x = self.input("shared", &[images, plane, plane, channels]);
        for window in [Window::square(3, 1, 1), Window::square(1, 1, 0), Window::square(1, 2, 0)] {
            let weight = self.parameter("weight", &[channels, window.taps() * channels]);
            self.result("branch", Op::Conv2d { x, weight, bias: None, window })?;
        }
        Ok(())
    }

    pub(super) fn pool(&mut self) -> Result<(), GraphError> {
        let images = self.random.pick(&[1, 2, 9]);
        for channels in [3, 8, 40] {
            let (plane, window) = loop {
                let (plane, window) = match self.random.below(3) {
                    0 => ([7, 6], Window::square(2, 2, 0)),
                    1 => ([8, 9], Window::square(3, 2, 1)),
                    _ => self.window(),
                };
                let halves = (0..2).all(|axis| 2 * window.padding[axis] <= window.kernel[axis]);
                let shape = Shape::from([images, plane[0], plane[1], channels]);
                if halves && Planes::new(&shape, window).is_ok() {
                    break (plane, window);
                }
            };
            let x = self.input("x", &[images, plane[0], plane[1], channels]);
            self.result("largest", Op::MaxPool { x, window })?;
            self.result("mean", Op::AveragePool { x, window })?;
            let window = Window::whole(plane[0], plane[1]);
            self.result("global", Op::AveragePool { x, window })?;
        }
        Ok(())
    }
}
