//! Every option of a training run.

use super::values::{
    CooldownShapeArg, DecayTargetsArg, DeviceArg, OptimizerArg, OrderArg, OverlongArg, ScheduleArg,
    Seed, Size, Span,
};
use crate::base::BaseArg;
use crate::codec::CodecArg;
use crate::cpu_products::CpuProductsArg;
use crate::forced::{ActivationsArg, OnDiskArg, PlacementArg, UpdateArg};
use crate::lora::LoraArg;
use crate::precision::{MomentsArg, PrecisionArg};
use crate::predict::PredictArg;
use crate::save_mode::SaveModeArg;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;

/// A number that cannot be zero.
macro_rules! count {
    ($value:literal) => {
        const { std::num::NonZero::new($value).expect("not zero") }
    };
}

options! {
    "Run" {
        /// Name of the run, and of its folder. If not given, the name of the config file.
        name: String;
        /// Folder of all runs.
        runs: PathBuf = PathBuf::from("runs");
        /// Steps of the run, a billion at most; 1000 if neither this nor epochs is given.
        steps: NonZeroU64;
        /// Passes over the rows of the training data, instead of steps: 3, or 0.5 for half of them. The last step may
        /// begin the next pass.
        epochs: f64;
        /// Of fresh weights, of rounding and of the order of the data: any number of 64 bits. In a config file,
        /// numbers above 9223372036854775807 are written as text, "18446744073709551615".
        seed: Seed = Seed(0);
    }
    "Model" {
        /// A preset (see `storm model list`), trained from scratch; a Hugging Face directory, whose weights are trained
        /// on; or the name of a model on the hub, `OWNER/MODEL`, with or without a revision, `@REVISION`.
        model: String;
        /// Layers, if not as the preset.
        layers: NonZeroUsize;
        /// Width of the residual stream, if not as the preset.
        width: NonZeroUsize;
        /// Query heads, if not as the preset; each is as wide as the width divided by their number.
        heads: NonZeroUsize;
        /// Key and value heads, if not as many as there are query heads.
        kv_heads: NonZeroUsize;
        /// Width inside the MLP; four times the width if that is given.
        mlp_width: NonZeroUsize;
    }
    "Adapters" {
        /// Train adapters (LoRA) beside the model's weights, which stay as they are: a table of rank; alpha (twice the rank
        /// if not given); dropout; targets: `all-linear` (if not given), a name, a list of names, or a pattern for the whole name of a
        /// module; rslora; modules-to-save; rank-pattern and alpha-pattern. As a flag: `--lora 'rank=16, alpha=32'`.
        lora: LoraArg;
        /// A directory with an adapter, as PEFT or STORM saves it: go on with that one.
        adapter: PathBuf;
        /// How the weights beside adapters are stored. `int8` rounds them once, when they are loaded.
        base: BaseArg = BaseArg::Bf16;
    }
    "Data" {
        /// What to learn: a dataset that `storm data pack` made; or what is packed on first use, text or a folder of
        /// pictures: the files of CIFAR-10 or MNIST, or PNG and JPEG files with a subfolder for each class.
        data: PathBuf;
        /// For text that is packed on first use: `bytes`, or the path of a tokenizer.json. If not given, the one in
        /// the model's directory; for a preset, `bytes`.
        tokenizer: String;
        /// For chats that are packed on first use: `model`, the template that came with the tokenizer; `chatml`;
        /// `plain`, a line of `role: message` each; or the path of a Jinja template. If not given, `model`.
        chat_template: String;
        /// Share of data packed on first use that is held out for evaluation, unless it has a test part of its own.
        held_out: f64 = 0.05;
        /// Tokens per sequence, 16777216 at most.
        seq: NonZeroUsize = count!(1024);
        /// What becomes of samples that are longer than that.
        overlong: OverlongArg = OverlongArg::Drop;
        /// In which order the rows of a dataset come. If not given, `window` for pictures and `global` for text.
        order: OrderArg;
        /// Host memory for data on its way from the disk. Evaluations take an eighth of it, or what they need.
        data_ram: Size = Size(256 << 20);
    }
    "Pictures" {
        /// Mirror every second picture at random.
        flip: bool = false;
        /// Pad pictures by this many pixels on each side, as mirrored there, and cut out a part of the old size at random;
        /// 0 for none.
        crop: usize = 0;
        /// Blank a square of this side at a random place; 0 for none.
        cutout: usize = 0;
    }
    "Step" {
        /// Sequences or pictures per micro-batch; 1 if neither this nor tokens-per-step is given.
        batch: NonZeroUsize;
        /// Micro-batches per step; 1 if neither this nor tokens-per-step is given.
        accumulate: NonZeroUsize;
        /// Tokens of a step, instead of batch and accumulate, which are then chosen for speed and stay
        /// for the whole run.
        tokens_per_step: NonZeroUsize;
        /// Lanes of a step: its micro-batches are divided into so many lanes, in order and evenly. Gradients are accumulated
        /// lane by lane, and the gradient of the step is the f32 sum of its lanes in order, rounded once. This changes the last bits
        /// of gradients, so it stays for the whole run.
        lanes: NonZeroUsize = count!(1);
        /// Storage of parameters, gradients and optimizer state, and how layers multiply.
        precision: PrecisionArg = PrecisionArg::Bf16Stochastic;
        /// How activations wait for the backward pass. `int8` stores what goes into gated units, the largest of them, in half
        /// of the memory. It changes gradients a little, so it stays for the whole run.
        activation_codec: CodecArg = CodecArg::None;
        /// How the CPU sums bf16 products. This changes last bits, so it stays for the whole run.
        cpu_products: CpuProductsArg = CpuProductsArg::Fma;
        /// Rows of logits that exist at a time.
        chunk_rows: NonZeroUsize = count!(2048);
    }
    "Optimizer" {
        /// The rule that updates weights.
        optimizer: OptimizerArg = OptimizerArg::Adamw;
        /// The highest learning rate. If not given: 3e-4 for fresh weights, 2e-5 to train all weights of a language model
        /// further, 2e-4 for its adapters.
        learning_rate: f64;
        /// The learning rate of the last step; a tenth of the highest if not given.
        final_learning_rate: f64;
        /// Steps over which the learning rate rises.
        warmup: u64 = 0;
        /// What it does after that.
        schedule: ScheduleArg = ScheduleArg::Cosine;
        /// With the schedule `wsd`, the last part of the run, in which the learning rate falls: a share of the steps, below
        /// 1, or a number of them. If not given, 0.2.
        cooldown: Span;
        /// With the schedule `wsd`, how it falls; `1-sqrt` if not given.
        cooldown_shape: CooldownShapeArg;
        /// How much weights shrink in a step, times the learning rate.
        weight_decay: f64 = 0.1;
        /// Share of a target that is spread evenly over all classes or tokens.
        label_smoothing: f64 = 0.0;
        /// Which weights shrink.
        decay_targets: DecayTargetsArg = DecayTargetsArg::Matrices;
        /// With the optimizer `sgd`, the share of its momentum that a step keeps; 0.9 if not given, and 0 for none.
        momentum: f64;
        /// With the optimizer `sgd`, whether a step follows the gradient and the momentum as the next step keeps it, after
        /// Nesterov; false if not given.
        nesterov: bool;
        /// Decay of the first moment.
        beta1: f64 = 0.9;
        /// Decay of the second moment.
        beta2: f64 = 0.95;
        /// Added to the root of the second moment.
        epsilon: f64 = 1e-8;
        /// Gradients are scaled down to this norm; 0 leaves them as they are.
        clip: f64 = 1.0;
        /// How both moments are stored.
        moments: MomentsArg = MomentsArg::Full;
    }
    "Prediction" {
        /// Move weights between steps along the direction in which they went, without a backward pass, and undo what does not
        /// lower the loss on held-out data: a table of direction (`last-update`, `average`, `difference`, `outer`,
        /// `weight-average`; `none` and `random` to compare with); controller (`line-search` if not given, `constant` or `rssm`);
        /// accept (`if-lower` if not given, or `always`); tau; growth; jumps; window; momentum; the lengths of the phases warm-up,
        /// full and correct; probe-batches; noise; margin. docs/predictive.md explains them. As a flag:
        /// `--predict 'direction="last-update"'`.
        predict: PredictArg;
    }
    "Memory" {
        /// Where to train.
        device: DeviceArg = DeviceArg::Auto;
        /// Device memory of the process, everything included: 16GiB, 12GB, 500MiB. If not given, that of
        /// the card less a little; on the CPU, half of the memory that is available.
        vram: Size;
        /// Host memory for what does not stay on the device. If not given, what is available less a
        /// little.
        ram: Size;
        /// A folder on a local disk for optimizer state and frozen weights that host memory cannot hold. It is scratch
        /// space, and empty after the run. See docs/disk.md.
        disk: PathBuf;
        /// How much of that disk may be used: 200GB. If not given, what is free less a tenth.
        disk_space: Size;
        /// What the drive is rated for, in bytes written (TBW): 1200TB.
        disk_endurance: Size;
        /// Run even if that uses up more than a tenth of what the drive is rated for in a month. At a terminal,
        /// STORM asks instead.
        accept_wear: bool = false;
        /// What the card can do: a built-in profile, or a file that `storm probe` wrote. If not
        /// given, the CPU is measured.
        hardware: String;
        /// Threads of the CPU device, 1024 at most: each takes some megabytes of the host memory. If not given, all
        /// cores, or as many as a quarter of the host memory is enough for.
        threads: NonZeroUsize;
    }
    "Decisions that are otherwise the planner's" {
        /// What layers save for their backward pass.
        activations: ActivationsArg;
        /// The inputs of layers.
        layer_inputs: PlacementArg;
        /// Store the input of every n-th layer only, and run the layers between again.
        checkpoint_every: NonZeroUsize;
        /// Parameters of layers.
        weights: PlacementArg;
        /// Gradients of layers.
        gradients: PlacementArg;
        /// Optimizer state of layers.
        optimizer_state: PlacementArg;
        /// What is on disk, however much host memory there is. Needs disk.
        on_disk: OnDiskArg;
        /// When gradients are applied.
        update: UpdateArg;
        /// Micro-batches that go through a layer together.
        group: NonZeroUsize;
    }
    "Evaluation and checkpoints" {
        /// Steps between two evaluations on held-out data; if not given, there is one at the end.
        eval_every: NonZeroU64;
        /// Steps' worth of held-out data that an evaluation looks at, at most.
        eval_steps: NonZeroU64 = count!(8);
        /// Stop after this many evaluations in a row without a better one.
        patience: NonZeroU32;
        /// Steps between two checkpoints; if not given, there is one at the end.
        save_every: NonZeroU64;
        /// What steps do while a checkpoint is written.
        save_mode: SaveModeArg = SaveModeArg::Auto;
        /// How many of the newest checkpoints stay.
        keep_last: NonZeroUsize = count!(2);
        /// Checkpoints of steps that are a multiple of this stay, too.
        keep_every: NonZeroU64;
        /// Save a checkpoint whenever an evaluation is the best so far, and keep the best.
        keep_best: bool = true;
    }
    "Output" {
        /// Steps between two lines of progress where there is no terminal.
        log_every: NonZeroU64 = count!(10);
        /// Tokens to write at the end, by the trained model, on the CPU. Meant for small models.
        sample_tokens: usize = 0;
        /// What that text begins with.
        sample_prompt: String = String::new();
        /// How daring it is: 0 takes the likeliest token always.
        temperature: f64 = 0.8;
    }
}

impl Given {
    /// [`Given::or`]; of two ways to say the same, one that is given here drops the other there.
    pub(crate) fn over(self, mut other: Given) -> Given {
        if self.steps.is_some() {
            other.epochs = None;
        }
        if self.epochs.is_some() {
            other.steps = None;
        }
        if self.batch.is_some() || self.accumulate.is_some() {
            other.tokens_per_step = None;
        }
        if self.tokens_per_step.is_some() {
            (other.batch, other.accumulate) = (None, None);
        }
        self.or(other)
    }
}
