//! A section of an image classifier under construction.

use super::parameters::Stored;
use super::{Augmentation, ImageConfig};
use crate::{BuildOptions, DROPOUT_INPUT, PHASE_INPUT, StoredOrder, Trainable};
use storm_graph::random::{DROPOUT_WORDS, PHASE_WORDS};
use storm_graph::{
    Accuracy, ActivationFunction, AugmentSettings, BatchNormOptions, Border, Carried, DType, Flip,
    GraphError, NormActivation, Op, Section, SectionBuilder, Shape, TensorId, Window,
};

/// The tensor passed between sections.
const HIDDEN: &str = "hidden";

/// The defaults of PyTorch's `BatchNorm2d`.
const EPSILON: f32 = 1e-5;
const MOMENTUM: f32 = 0.1;

/// Whether a convolution adds a bias.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Bias {
    /// It does.
    Added,
    /// It does not, because a norm with its own bias follows.
    None,
}

/// A template of a network: a graph, and how its parameters are stored.
pub(super) struct Draft<'a> {
    builder: SectionBuilder,
    stored: Vec<Stored>,
    config: &'a ImageConfig,
    options: &'a BuildOptions,
    /// The shape of the previous section's output.
    before: Option<Shape>,
    /// [`PHASE_INPUT`], if anything depends on it.
    phase: Option<TensorId>,
}

impl<'a> Draft<'a> {
    pub(super) fn new(
        name: &str,
        config: &'a ImageConfig,
        options: &'a BuildOptions,
        before: Option<Shape>,
    ) -> Draft<'a> {
        let mut builder = SectionBuilder::new(name, options.batch, 1, options.dtype);
        if !learns(options) {
            builder.freeze();
        }
        let (stored, phase) = (Vec::new(), None);
        Draft { builder, stored, config, options, before, phase }
    }

    /// The previous section's output, (B, H, W, C).
    pub(super) fn hidden(&mut self) -> TensorId {
        let shape = self.before.clone().unwrap_or_else(|| unreachable!("the first reads images"));
        self.builder.take(HIDDEN, shape)
    }

    /// The images of the batch, augmented in training and normalized, (B, H, W, channels).
    pub(super) fn images(&mut self) -> Result<TensorId, GraphError> {
        let ImageConfig { image_size: [height, width], channels, mean, std, .. } = self.config;
        let (batch, dtype) = (self.options.batch, self.options.dtype);
        let shape = [batch, *height, *width, *channels];
        let images = self.builder.input_of("images", shape, DType::U8);
        let samples = self.builder.input_of("samples", [batch, 3], DType::I32);
        let phase = self.phase();
        let Augmentation { flip, crop, cutout } = self.options.augmentation;
        let settings = AugmentSettings {
            mean: mean.iter().map(|&mean| mean as f32).collect(),
            deviation: std.iter().map(|&std| std as f32).collect(),
            flip: if flip { Flip::Horizontal } else { Flip::Never },
            padding: crop,
            border: Border::Reflect,
            cutout,
        };
        self.apply("augmented", Op::Augment { images, samples, phase, settings, dtype })
    }

    fn phase(&mut self) -> TensorId {
        let builder = &mut self.builder;
        *self.phase.get_or_insert_with(|| builder.input_of(PHASE_INPUT, [PHASE_WORDS], DType::I32))
    }

    /// The axes of an activation.
    pub(super) fn axes(&self, x: TensorId) -> [usize; 4] {
        match *self.builder.shape_of(x).axes() {
            [batch, height, width, channels] => [batch, height, width, channels],
            _ => unreachable!("activations are (B, H, W, C)"),
        }
    }

    pub(super) fn apply(&mut self, name: &str, op: Op<TensorId>) -> Result<TensorId, GraphError> {
        self.builder.apply(name, op)
    }

    /// Applies `NAME.weight`, and `NAME.bias` if there is one: (B, H, W, I) to (B, OH, OW,
    /// `outputs`).
    pub(super) fn convolution(
        &mut self,
        name: &str,
        x: TensorId,
        outputs: usize,
        window: Window,
        bias: Bias,
    ) -> Result<TensorId, GraphError> {
        let inputs = self.axes(x)[3];
        let [height, width] = window.kernel;
        let file_shape = vec![outputs, inputs, height, width];
        self.windows(name, x, window, bias, file_shape)
    }

    /// A dense layer over all positions and channels: (B, H, W, I) to (B, 1, 1, `outputs`). In
    /// PyTorch, this is a linear layer after a `flatten` of (I, H, W).
    pub(super) fn dense(
        &mut self,
        name: &str,
        x: TensorId,
        outputs: usize,
    ) -> Result<TensorId, GraphError> {
        let [_, height, width, inputs] = self.axes(x);
        let file_shape = vec![outputs, inputs * height * width];
        self.windows(name, x, Window::whole(height, width), Bias::Added, file_shape)
    }

    fn windows(
        &mut self,
        name: &str,
        x: TensorId,
        window: Window,
        bias: Bias,
        file_shape: Vec<usize>,
    ) -> Result<TensorId, GraphError> {
        let (outputs, positions) = (file_shape[0], window.taps());
        let shape = vec![outputs, file_shape[1..].iter().product()];
        let weight = format!("{name}.weight");
        let order = StoredOrder::ChannelsFirst { positions };
        let parameter = self.builder.parameter(&weight, &shape[..]);
        self.stored.push(Stored { name: weight, shape, file_shape, order });
        let bias = (bias == Bias::Added).then(|| self.vector(format!("{name}.bias"), outputs));
        self.apply(name, Op::Conv2d { x, weight: parameter, bias, window })
    }

    fn vector(&mut self, name: String, size: usize) -> TensorId {
        let parameter = self.builder.parameter(&name, [size]);
        self.stored.push(Stored::plain(name, &[size]));
        parameter
    }

    /// The weight of a linear layer, (outputs, inputs).
    pub(super) fn linear_weight(&mut self, name: &str, outputs: usize, inputs: usize) -> TensorId {
        let name = format!("{name}.weight");
        let parameter = self.builder.parameter(&name, [outputs, inputs]);
        self.stored.push(Stored::plain(name, &[outputs, inputs]));
        parameter
    }

    /// Batch norm, then the sum with `addend`, then an activation.
    pub(super) fn norm(
        &mut self,
        name: &str,
        x: TensorId,
        addend: Option<TensorId>,
        activation: NormActivation,
    ) -> Result<TensorId, GraphError> {
        let channels = self.axes(x)[3];
        for part in ["weight", "bias", "running_mean", "running_var"] {
            self.stored.push(Stored::plain(format!("{name}.{part}"), &[channels]));
        }
        let phase = self.phase();
        let options = BatchNormOptions { epsilon: EPSILON, momentum: MOMENTUM, activation };
        self.builder.batch_norm(name, x, phase, addend, options)
    }

    /// `NAME.conv`, `NAME.norm` and a ReLU.
    pub(super) fn convolution_norm(
        &mut self,
        name: &str,
        x: TensorId,
        outputs: usize,
        window: Window,
    ) -> Result<TensorId, GraphError> {
        let x = self.convolution(&format!("{name}.conv"), x, outputs, window, Bias::None)?;
        self.norm(&format!("{name}.norm"), x, None, NormActivation::Relu)
    }

    pub(super) fn relu(&mut self, name: &str, x: TensorId) -> Result<TensorId, GraphError> {
        self.apply(name, Op::Activation { x, function: ActivationFunction::Relu })
    }

    /// Max-pooling over squares that do not overlap.
    pub(super) fn max_pool(
        &mut self,
        name: &str,
        x: TensorId,
        side: usize,
    ) -> Result<TensorId, GraphError> {
        self.apply(name, Op::MaxPool { x, window: Window::square(side, side, 0) })
    }

    /// `x` with dropout in training.
    pub(super) fn dropped(
        &mut self,
        name: &str,
        x: TensorId,
        rate: f32,
    ) -> Result<TensorId, GraphError> {
        if rate == 0.0 || !learns(self.options) {
            return Ok(x);
        }
        let random = self.builder.input_of(DROPOUT_INPUT, [DROPOUT_WORDS], DType::I32);
        self.apply(name, Op::Dropout { x, random, addend: None, rate, stream: 0 })
    }

    /// The cross-entropy of `hidden` (B, C) times `weight` (classes, C), and the number of correct
    /// predictions.
    pub(super) fn loss(
        &mut self,
        hidden: TensorId,
        weight: TensorId,
        chunk_rows: usize,
    ) -> Result<Vec<(String, TensorId)>, GraphError> {
        let targets = self.builder.input_of("targets", [self.options.batch], DType::I32);
        let denominator = self.builder.input_of("denominator", Shape::scalar(), DType::F32);
        let op = Op::HeadLoss {
            hidden,
            weight,
            targets,
            denominator,
            chunk_rows,
            label_smoothing: self.options.label_smoothing,
            accuracy: Accuracy::Compute,
        };
        let outputs = self.builder.apply_all("row_loss", op)?;
        let (row_loss, row_correct) = (outputs[0], outputs[1]); // (B) each
        let mut results = Vec::new();
        for (name, x) in [("loss", row_loss), ("correct", row_correct)] {
            results.push((name.to_owned(), self.apply(name, Op::Sum { x })?));
        }
        Ok(results)
    }

    /// Finishes a section that outputs `hidden`.
    pub(super) fn hand_on(self, hidden: TensorId) -> (Section, Vec<Stored>) {
        (self.builder.hand_on_all(vec![Carried::new(HIDDEN, hidden)]), self.stored)
    }

    /// Finishes the last section, with its results.
    pub(super) fn finish(self, results: Vec<(String, TensorId)>) -> (Section, Vec<Stored>) {
        (Section { results, ..self.builder.hand_on_all(Vec::new()) }, self.stored)
    }
}

/// Whether the program is for training.
fn learns(options: &BuildOptions) -> bool {
    matches!(options.trainable, Trainable::All)
}
