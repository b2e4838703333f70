//! The networks, stage by stage. Each is defined once: its computation, and how its parameters are
//! stored.

use super::ImageConfig;
use super::config::ImageNetwork;
use super::draft::{Bias, Draft};
use super::parameters::Stored;
use crate::{BuildOptions, ModelOutput};
use std::ops::Range;
use storm_graph::{GraphError, NormActivation, Op, Section, Shape, Stage, TensorId, Window};

/// A network as templates and stages, and how the parameters of each template are stored.
pub(super) struct Network {
    pub(super) sections: Vec<Section>,
    pub(super) stored: Vec<Vec<Stored>>,
    pub(super) stages: Vec<Stage>,
}

/// Builds the network of a config whose numbers are within their limits.
pub(super) fn network(config: &ImageConfig, options: &BuildOptions) -> Result<Network, GraphError> {
    let mut builder = Builder { config, options, templates: Vec::new(), stages: Vec::new() };
    match &config.network {
        ImageNetwork::SmallCnn { widths, hidden, dropout } => {
            builder.small_cnn(widths, *hidden, *dropout)?;
        }
        ImageNetwork::Resnet9 { widths, logit_scale } => {
            builder.resnet9(*widths, *logit_scale as f32)?
        }
        ImageNetwork::Resnet { widths, blocks } => builder.resnet(widths, *blocks)?,
    }
    let Builder { templates, stages, .. } = builder;
    let (sections, stored) = templates.into_iter().unzip();
    Ok(Network { sections, stored, stages })
}

struct Builder<'a> {
    config: &'a ImageConfig,
    options: &'a BuildOptions,
    templates: Vec<(Section, Vec<Stored>)>,
    stages: Vec<Stage>,
}

impl<'b> Builder<'b> {
    fn small_cnn(
        &mut self,
        widths: &[usize],
        hidden: usize,
        dropout: f64,
    ) -> Result<(), GraphError> {
        for (index, &width) in widths.iter().enumerate() {
            let mut draft = self.draft(&format!("conv{}", index + 1));
            let x = if index == 0 { draft.images()? } else { draft.hidden() }; // (B, H, W, I)
            let name = format!("conv{}", index + 1);
            let x = draft.convolution(&name, x, width, Window::square(3, 1, 1), Bias::Added)?;
            // The ReLU comes before the pool in other programs. Here it is after it, on a quarter of the elements:
            // the largest of a window is the same either way, and so is the element that gets its gradient.
            let x = draft.max_pool(&format!("pool{}", index + 1), x, 2)?; // (B, H/2, W/2, O)
            let x = draft.relu(&format!("relu{}", index + 1), x)?;
            self.once(draft, x);
        }
        let mut draft = self.draft("fc1");
        let x = draft.hidden();
        let x = draft.dense("fc1", x, hidden)?; // (B, 1, 1, hidden)
        let x = draft.relu("fc1.relu", x)?;
        let x = draft.dropped("fc1.dropped", x, dropout as f32)?;
        self.once(draft, x);
        self.head("fc2", None)
    }

    fn resnet9(&mut self, widths: [usize; 4], logit_scale: f32) -> Result<(), GraphError> {
        let mut draft = self.draft("prep");
        let x = draft.images()?;
        let x = draft.convolution_norm("prep", x, widths[0], Window::square(3, 1, 1))?;
        self.once(draft, x);
        for (stage, &width) in widths.iter().enumerate().skip(1) {
            let name = format!("layer{stage}");
            let mut draft = self.draft(&name);
            let x = draft.hidden();
            let window = Window::square(3, 1, 1);
            let x = draft.convolution(&format!("{name}.conv"), x, width, window, Bias::None)?;
            // Pool after the norm, like other PyTorch networks of this kind.
            let x = draft.norm(&format!("{name}.norm"), x, None, NormActivation::Relu)?;
            let mut x = draft.max_pool(&format!("{name}.pool"), x, 2)?;
            if stage != 2 {
                let first = format!("{name}.residual.0");
                let y = draft.convolution_norm(&first, x, width, window)?;
                let second = format!("{name}.residual.1");
                let y = draft.convolution_norm(&second, y, width, window)?;
                x = draft.apply(&format!("{name}.sum"), Op::Add { a: x, b: y })?;
            }
            self.once(draft, x);
        }
        let mut draft = self.draft("pool");
        let x = draft.hidden();
        let [_, height, width, _] = draft.axes(x);
        let window = Window::whole(height, width);
        let x = draft.apply("pool", Op::MaxPool { x, window })?; // (B, 1, 1, C)
        self.once(draft, x);
        self.head("fc", Some(logit_scale))
    }

    fn resnet(&mut self, widths: &[usize], blocks: usize) -> Result<(), GraphError> {
        let mut draft = self.draft("stem");
        let x = draft.images()?;
        let window = Window::square(3, 1, 1);
        let x = draft.convolution("conv1", x, widths[0], window, Bias::None)?;
        let x = draft.norm("bn1", x, None, NormActivation::Relu)?;
        self.once(draft, x);
        for (index, &width) in widths.iter().enumerate() {
            let series = format!("layer{}", index + 1);
            // The first block of a stage changes the shape of its input, except in the first stage.
            // The others are equal.
            let changed = usize::from(index > 0);
            if changed == 1 {
                let (draft, x) = self.basic_block(&series, width, 2)?;
                self.part_of(&series, draft, x, 0..1);
            }
            if blocks > changed {
                let (draft, x) = self.basic_block(&series, width, 1)?;
                self.part_of(&series, draft, x, changed..blocks);
            }
        }
        let mut draft = self.draft("pool");
        let x = draft.hidden();
        let [_, height, width, _] = draft.axes(x);
        let window = Window::whole(height, width);
        let x = draft.apply("pool", Op::AveragePool { x, window })?; // (B, 1, 1, C)
        self.once(draft, x);
        self.head("fc", None)
    }

    /// Two convolutions and a shortcut: the input itself, or a 1×1 convolution of it if its shape
    /// changes.
    fn basic_block(
        &self,
        name: &str,
        width: usize,
        stride: usize,
    ) -> Result<(Draft<'b>, TensorId), GraphError> {
        let mut draft = self.draft(name);
        let x = draft.hidden();
        let inputs = draft.axes(x)[3];
        let shortcut = match stride == 1 && inputs == width {
            true => x,
            false => {
                let window = Window::square(1, stride, 0);
                let y = draft.convolution("downsample.0", x, width, window, Bias::None)?;
                draft.norm("downsample.1", y, None, NormActivation::None)?
            }
        };
        let window = Window::square(3, stride, 1);
        let y = draft.convolution("conv1", x, width, window, Bias::None)?;
        let y = draft.norm("bn1", y, None, NormActivation::Relu)?;
        let y = draft.convolution("conv2", y, width, Window::square(3, 1, 1), Bias::None)?;
        let y = draft.norm("bn2", y, Some(shortcut), NormActivation::Relu)?;
        Ok((draft, y))
    }

    /// The linear head and the program's output.
    fn head(&mut self, name: &str, scale: Option<f32>) -> Result<(), GraphError> {
        let mut draft = self.draft(name);
        let x = draft.hidden();
        let [batch, height, width, channels] = draft.axes(x);
        let features = height * width * channels;
        let shape = Shape::from([batch, features]);
        let mut x = draft.apply("features", Op::Reshape { x, shape })?; // (B, C)
        if let Some(factor) = scale {
            x = draft.apply("scaled", Op::Scale { x, factor })?;
        }
        let weight = draft.linear_weight(name, self.config.classes, features); // (classes, C)
        let results = match self.options.output {
            ModelOutput::Logits => {
                let op = Op::Linear { x, weight, bias: None, addend: None };
                vec![("logits".to_owned(), draft.apply("logits", op)?)] // (B, classes)
            }
            ModelOutput::Loss { chunk_rows } => draft.loss(x, weight, chunk_rows)?,
        };
        self.stages.push(Stage::once(name, self.templates.len()));
        self.templates.push(draft.finish(results));
        Ok(())
    }

    fn draft(&self, name: &str) -> Draft<'b> {
        let before = self
            .templates
            .last()
            .map(|(section, _)| section.graph.tensor(section.carried_out[0].tensor).shape.clone());
        Draft::new(name, self.config, self.options, before)
    }

    /// Adds a section that runs once.
    fn once(&mut self, draft: Draft<'b>, hidden: TensorId) {
        let template = draft.hand_on(hidden);
        self.stages.push(Stage::once(template.0.name.clone(), self.templates.len()));
        self.templates.push(template);
    }

    /// Adds a section for these blocks of a series.
    fn part_of(&mut self, series: &str, draft: Draft<'b>, hidden: TensorId, blocks: Range<usize>) {
        self.stages.push(Stage::part_of(series, self.templates.len(), blocks));
        self.templates.push(draft.hand_on(hidden));
    }
}
