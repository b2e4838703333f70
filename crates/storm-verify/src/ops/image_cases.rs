//! Cases for the ops of vision networks.

use super::cases::{Builder, Data};
use storm_graph::random::{PHASE_WORDS, PhaseWords};
use storm_graph::*;

impl Builder {
    fn phase(&mut self) -> TensorId {
        let training = self.random.below(4) > 0;
        let words = PhaseWords { training, seed: self.random.bits() }.to_words();
        self.integers("phase", &[PHASE_WORDS], |_, i| words[i])
    }

    /// Row counts that take more than one block, and widths that fill no tile. Not very few rows,
    /// because there the gradient is mostly cancellation.
    fn channels(&mut self) -> Vec<usize> {
        match self.random.below(8) {
            0 => vec![40_003, 3],
            1 => vec![9, 512],
            2 => vec![700, 130],
            _ => {
                let width = self.random.pick(&[1, 3, 8, 33, 64, 65, 128]);
                let height = self.random.pick(&[4, 7, 16]);
                vec![self.random.pick(&[2, 3, 5]), height, self.random.pick(&[4, 9]), width]
            }
        }
    }

    pub(super) fn batch_norm(&mut self) -> Result<(), GraphError> {
        let shape = self.channels();
        let width = shape[shape.len() - 1];
        let x = self.input("x", &shape);
        let [running_mean, running_variance] = ["running_mean", "running_variance"].map(|name| {
            let id = self.graph.parameter(name, [width], DType::F32, Training::Running);
            self.floats(id);
            if let Some((_, Data::Floats(values))) = self.data.last_mut() {
                values.iter_mut().for_each(|value| *value = value.abs() + 0.1);
            }
            id
        });
        let phase = self.phase();
        let op = Op::BatchStatistics { x, running_mean, running_variance, phase };
        let statistics = self.apply("statistics", op)?;
        let dtype = self.random.pick(&[DType::F32, self.dtype]);
        let training =
            self.random.pick(&[Training::Trainable, Training::Trainable, Training::Frozen]);
        let [weight, bias] = ["weight", "bias"].map(|name| {
            let id = self.graph.parameter(name, [width], dtype, training);
            self.floats(id)
        });
        let addend = self.random.coin().then(|| self.input("addend", &shape));
        let op = Op::BatchNorm {
            x,
            mean: statistics[0],
            variance: statistics[1],
            weight,
            bias,
            addend,
            epsilon: 1e-3,
            activation: self.random.pick(&[NormActivation::None, NormActivation::Relu]),
        };
        self.result("y", op).map(drop)
    }

    pub(super) fn group_norm(&mut self) -> Result<(), GraphError> {
        let groups = self.random.pick(&[1, 2, 8]);
        let width = groups * self.random.pick(&[1, 3, 8, 17]);
        let shape = match self.random.below(4) {
            0 => vec![2, 700, width],
            _ => vec![self.random.pick(&[1, 3]), 8, self.random.pick(&[4, 9]), width],
        };
        let x = self.input("x", &shape);
        let dtype = self.random.pick(&[DType::F32, self.dtype]);
        let [weight, bias] = ["weight", "bias"].map(|name| {
            let id = self.graph.parameter(name, [width], dtype, Training::Trainable);
            self.floats(id)
        });
        let addend = self.random.coin().then(|| self.input("addend", &shape));
        let activation = self.random.pick(&[NormActivation::None, NormActivation::Relu]);
        let epsilon = 1e-3;
        let op = Op::GroupNorm { x, weight, bias, addend, groups, epsilon, activation };
        self.result("y", op).map(drop)
    }

    /// Small integers, whose sums are exact, so logits often tie and both devices see the same
    /// ties. Several rows, because with a single one a probability near one leaves only rounding
    /// error.
    pub(super) fn accuracy(&mut self) -> Result<(), GraphError> {
        let classes = self.random.pick(&[2, 10, 100, 1003]);
        let (rows, width) = (self.random.pick(&[7, 20, 100]), self.random.pick(&[8, 33]));
        let hidden = self.input("hidden", &[rows, width]);
        let weight = self.parameter("weight", &[classes, width]);
        for (_, data) in &mut self.data {
            if let Data::Floats(values) = data {
                values.iter_mut().for_each(|x| *x = x.round().clamp(-1.0, 1.0));
            }
        }
        let targets = self.integers("targets", &[rows], |random, _| match random.below(6) {
            0 => IGNORE_INDEX,
            _ => random.below(classes) as i32,
        });
        let op = Op::HeadLoss {
            hidden,
            weight,
            targets,
            denominator: self.scalar("denominator", 5.0),
            chunk_rows: self.random.pick(&[3, 1000]),
            label_smoothing: self.random.pick(&[0.0, 0.2]),
            accuracy: Accuracy::Compute,
        };
        // Once with its gradient, which overwrites it, and once forward only.
        self.result("loss", op.clone())?;
        self.apply("forward only", op).map(drop)
    }

    pub(super) fn augment(&mut self) -> Result<(), GraphError> {
        let channels = self.random.pick(&[1, 3, 4]);
        let [height, width] = [0, 1].map(|_| self.random.pick(&[5, 8, 13, 32]));
        let batch = self.random.pick(&[1, 3, 17]);
        let images = self.graph.input("images", [batch, height, width, channels], DType::U8);
        let count = batch * height * width * channels;
        let bytes = (0..count).map(|_| self.random.below(256) as u8).collect();
        self.data.push((images, Data::Bytes(bytes)));
        let samples =
            self.integers("samples", &[batch, SAMPLE_WORDS], |random, _| random.bits() as i32);
        let phase = self.phase();
        let settings = AugmentSettings {
            mean: (0..channels).map(|channel| 0.4 + 0.05 * channel as f32).collect(),
            deviation: (0..channels).map(|channel| 0.2 + 0.01 * channel as f32).collect(),
            flip: self.random.pick(&[Flip::Never, Flip::Horizontal]),
            padding: self.random.pick(&[0, 2, 4]),
            border: self.random.pick(&[Border::Black, Border::Reflect]),
            cutout: self.random.pick(&[0, 3, 8]),
        };
        let dtype = self.dtype;
        self.apply("out", Op::Augment { images, samples, phase, settings, dtype }).map(drop)
    }
}
