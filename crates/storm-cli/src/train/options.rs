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
use storm_plan::Lanes;

/// A number that cannot be zero.
macro_rules! count {
    ($value:literal) => {
        const { std::num::NonZero::new($value).expect("not zero") }
    };
}

options! {
    "Run" {
        /// Name of the run and of its folder. Default: the name of the config file, without its extension.
        name: String;
        /// Folder that holds all runs; this run writes to RUNS/NAME.
        runs: PathBuf = PathBuf::from("runs");
        /// Number of training steps, at most a billion. Default: 1000, if epochs is not given either.
        steps: NonZeroU64;
        /// Length of the run in passes over the training data, instead of steps: 3, or 0.5 for half a pass. Rounded up
        /// to whole steps, so the last step may begin another pass.
        epochs: f64;
        /// Random seed for initial weights, data order, stochastic rounding, dropout and augmentation: 0 to
        /// 18446744073709551615. In a config file, write a seed above 9223372036854775807 in quotes.
        seed: Seed = Seed(0);
    }
    "Model" {
        /// Model to train: a preset (`storm model list`), which starts from random weights; or a Hugging Face directory
        /// or a model on the hub (`OWNER/MODEL` or `OWNER/MODEL@REVISION`), which starts from its own weights.
        model: String;
        /// Number of layers of a language preset. Default: the preset's.
        layers: NonZeroUsize;
        /// Width of the residual stream (hidden size) of a language preset. Default: the preset's.
        width: NonZeroUsize;
        /// Number of query heads of a language preset; the width of a head is width divided by heads. Default: the
        /// preset's.
        heads: NonZeroUsize;
        /// Number of key and value heads of a language preset. Default: as many as heads if that is given, else the
        /// preset's.
        kv_heads: NonZeroUsize;
        /// Width of the MLP (intermediate size) of a language preset. Default: four times width if that is given, else
        /// the preset's.
        mlp_width: NonZeroUsize;
    }
    "Adapters" {
        /// Train LoRA adapters and freeze the model's own weights. A table with rank, alpha (default: twice the rank),
        /// dropout, targets (`all-linear`, which is the default; a module name; a list of names; or a regular
        /// expression that matches whole module names), rslora, modules-to-save, rank-pattern and alpha-pattern; see
        /// docs/lora.md. As a flag: `--lora 'rank=16, alpha=32'`.
        lora: LoraArg;
        /// Continue training the LoRA adapter in this directory, which PEFT or STORM saved.
        adapter: PathBuf;
        /// How the frozen weights of a LoRA run are stored. `int8` and `nf4` quantize them once, when they are loaded.
        base: BaseArg = BaseArg::Bf16;
    }
    "Data" {
        /// Training data: a dataset that `storm data pack` wrote, or files to pack when the run starts: text, chats, or
        /// a folder of pictures (the files of CIFAR-10 or MNIST, or PNG and JPEG files in a subfolder for each class).
        data: PathBuf;
        /// Tokenizer for text that the run packs: `bytes`, or the path of a tokenizer.json. Default: the one in the
        /// model's directory; for a preset, `bytes`.
        tokenizer: String;
        /// Template for chats that the run packs: `model` (the one that came with the tokenizer), `chatml`, `plain` (a
        /// line `role: message` for each message), or the path of a Jinja template. Default: `model`.
        chat_template: String;
        /// Fraction of the data to hold out for evaluation, if the run packs the data and the data has no test part of
        /// its own.
        held_out: f64 = 0.05;
        /// Tokens per sequence, 16777216 at most.
        seq: NonZeroUsize = count!(1024);
        /// What to do with samples longer than seq.
        overlong: OverlongArg = OverlongArg::Drop;
        /// Order in which training reads the rows of a dataset (default: `window` for pictures, `global` for text).
        order: OrderArg;
        /// Host memory for data read ahead from disk: 256MiB, 2GiB. Evaluations take an eighth of it, or what they need
        /// if that is more.
        data_ram: Size = Size(256 << 20);
    }
    "Pictures" {
        /// Mirror each training picture left to right with probability 1/2.
        flip: bool = false;
        /// Pad training pictures by this many pixels on each side, by reflection, and crop them to their original size
        /// at a random offset; 0 for none.
        crop: usize = 0;
        /// Replace a square of this many pixels a side, around a random pixel of each training picture, by the mean
        /// color; 0 for none.
        cutout: usize = 0;
    }
    "Step" {
        /// Sequences or pictures per micro-batch. Default: 1, or chosen by STORM if tokens-per-step is given.
        batch: NonZeroUsize;
        /// Micro-batches per step (gradient accumulation). Default: 1, or chosen by STORM if tokens-per-step is given.
        accumulate: NonZeroUsize;
        /// Tokens per step, instead of batch and accumulate: STORM chooses both for speed and keeps them for the whole
        /// run.
        tokens_per_step: NonZeroUsize;
        /// Lanes of a step, such as 8 or `2x8`. The micro-batches of a step are divided evenly and in order into lanes.
        /// Gradients are accumulated lane by lane; the gradient of the step is the f32 sum of its lanes in order, rounded
        /// once. `2x8` is two groups of eight lanes: the lanes of each group are added first, then the sums of the groups,
        /// so that machines of eight ranks send each other only sums. Lanes change the last bits of gradients, so a run
        /// must keep them.
        lanes: Lanes = Lanes::ONE;
        /// Number formats of parameters, gradients, optimizer state and matrix products.
        precision: PrecisionArg = PrecisionArg::Bf16Stochastic;
        /// How activations are stored until the backward pass. `int8` halves the memory of the largest ones, the inputs
        /// of gated units. Gradients change slightly, so a resumed run must keep it.
        activation_codec: CodecArg = CodecArg::None;
        /// How the CPU device sums bf16 products. The last bits of results depend on it, so a resumed run must keep it.
        cpu_products: CpuProductsArg = CpuProductsArg::Fma;
        /// Rows (tokens) of logits to compute at a time. Fewer rows take less device memory.
        chunk_rows: NonZeroUsize = count!(2048);
    }
    "Optimizer" {
        /// Optimizer that updates the weights.
        optimizer: OptimizerArg = OptimizerArg::Adamw;
        /// Highest learning rate. Default: 3e-4 for fresh weights, 2e-5 to train all weights of a language model further,
        /// 2e-4 for adapters.
        learning_rate: f64;
        /// Learning rate of the last step, except with schedule `constant`. Default: a tenth of learning-rate.
        final_learning_rate: f64;
        /// Steps over which the learning rate rises linearly to learning-rate.
        warmup: u64 = 0;
        /// Learning rate after the warm-up.
        schedule: ScheduleArg = ScheduleArg::Cosine;
        /// For schedule `wsd`: length of the final decay, as a fraction of the steps (below 1) or as a number of steps.
        /// Default: 0.2.
        cooldown: Span;
        /// For schedule `wsd`: shape of the final decay (default: `1-sqrt`).
        cooldown_shape: CooldownShapeArg;
        /// Weight decay. `adamw` multiplies weights by 1 - learning rate × weight-decay in each step; `sgd` adds
        /// weight-decay × weight to the gradient.
        weight_decay: f64 = 0.1;
        /// Label smoothing: the fraction of each target that is spread evenly over all classes or tokens.
        label_smoothing: f64 = 0.0;
        /// Which weights get weight decay.
        decay_targets: DecayTargetsArg = DecayTargetsArg::Matrices;
        /// For optimizer `sgd`: momentum; 0 for none. Default: 0.9.
        momentum: f64;
        /// For optimizer `sgd`: use Nesterov momentum. Default: false.
        nesterov: bool;
        /// For optimizer `adamw`: decay rate of the first moment.
        beta1: f64 = 0.9;
        /// For optimizer `adamw`: decay rate of the second moment.
        beta2: f64 = 0.95;
        /// For optimizer `adamw`: added to the square root of the second moment.
        epsilon: f64 = 1e-8;
        /// Gradient clipping: gradients with a norm above this are scaled down to it; 0 for none.
        clip: f64 = 1.0;
        /// For optimizer `adamw`: how both moments are stored.
        moments: MomentsArg = MomentsArg::Full;
    }
    "Prediction" {
        /// Move weights between steps along the direction in which they went, without a backward pass, and undo what does not
        /// lower the loss on held-out data: a table of direction (`last-update`, `average`, `difference`, `outer`,
        /// `weight-average`, `dmd`; `none` and `random` to compare with); controller (`line-search` if not given, `constant` or `rssm`);
        /// accept (`if-lower` if not given, or `always`); tau; cost; growth; jumps; window; momentum; the lengths of the phases warm-up,
        /// full and correct; probe-batches; probe-weights (`as-trained` if not given, or `int8`); noise; margin. docs/predictive.md explains them. As a flag:
        /// `--predict 'direction="last-update"'`.
        predict: PredictArg;
    }
    "Memory" {
        /// Device to train on.
        device: DeviceArg = DeviceArg::Auto;
        /// Device memory that the process may use, including the CUDA context: 16GiB, 12GB, 500MiB. Default: the card's
        /// memory less 2 %; on the CPU device, half of ram.
        vram: Size;
        /// Host memory that the run may use: 64GiB. Default: what the machine or its control group has available, less
        /// an eighth but at most 4 GiB.
        ram: Size;
        /// Folder on a local disk for optimizer state and frozen weights that do not fit in host memory. It is scratch
        /// space, and empty after the run. See docs/disk.md.
        disk: PathBuf;
        /// Disk space that the run may use: 200GB. Default: the free space less a tenth.
        disk_space: Size;
        /// Rated endurance of the drive in bytes written (TBW in its data sheet): 1200TB. Default: estimated from what
        /// the drive reports, if it does.
        disk_endurance: Size;
        /// Run even if that uses more than a tenth of the drive's rated endurance in 30 days. If false, STORM asks at a
        /// terminal and refuses elsewhere.
        accept_wear: bool = false;
        /// Hardware profile to plan with: a built-in one (`storm plan --hardware list` names them) or a file that
        /// `storm probe` wrote. Default: on a GPU, the profile of the card, measured on first use; on the CPU, measured
        /// at each start.
        hardware: String;
        /// Threads of the CPU device, at most 1024. Each takes a few megabytes of host memory. Default: all cores, or
        /// as many as a quarter of ram is enough for.
        threads: NonZeroUsize;
    }
    "Planner overrides" {
        /// What to do with activations that layers save for the backward pass.
        activations: ActivationsArg;
        /// Where to keep the inputs of layers until the backward pass.
        layer_inputs: PlacementArg;
        /// Store the input of every n-th layer only, and recompute the layers in between (activation checkpointing).
        checkpoint_every: NonZeroUsize;
        /// Where to keep the parameters of layers.
        weights: PlacementArg;
        /// Where to keep the gradients of layers.
        gradients: PlacementArg;
        /// Where to keep the optimizer state of layers.
        optimizer_state: PlacementArg;
        /// What to keep on disk even if host memory has room for it (needs disk).
        on_disk: OnDiskArg;
        /// When to apply gradients.
        update: UpdateArg;
        /// Micro-batches that go through a layer together, so that streamed weights are copied once for all of them.
        group: NonZeroUsize;
    }
    "Evaluation and checkpoints" {
        /// Steps between evaluations on held-out data; the run also evaluates at its end. Default: only at the end.
        eval_every: NonZeroU64;
        /// Length of an evaluation: as much held-out data as this many training steps read, or all if there is less.
        eval_steps: NonZeroU64 = count!(8);
        /// After the last step, also measure the loss on the held-out rows that nothing else reads: those behind the rows of
        /// evaluations (eval-steps), up to those that test-leave leaves out. On resume, eval-steps cannot become less than
        /// evaluations of the run read.
        test: bool = false;
        /// Held-out rows at the end that the test does not read (needs test). The rest is then read in whole steps of rows;
        /// with 0, to its end. Default: those that predictions read.
        test_leave: u64;
        /// Stop the run after this many evaluations in a row without a new lowest held-out loss. Default: do not stop
        /// early.
        patience: NonZeroU32;
        /// Steps between checkpoints; the run also saves one at its end. Default: only at the end.
        save_every: NonZeroU64;
        /// Whether training continues while a checkpoint is written.
        save_mode: SaveModeArg = SaveModeArg::Auto;
        /// Number of newest checkpoints to keep.
        keep_last: NonZeroUsize = count!(2);
        /// Also keep checkpoints whose step is a multiple of this.
        keep_every: NonZeroU64;
        /// Save a checkpoint at each evaluation that is the best so far, and keep the best one.
        keep_best: bool = true;
    }
    "Output" {
        /// Steps between lines of progress if the output is not a terminal.
        log_every: NonZeroU64 = count!(10);
        /// Tokens to generate with the trained model at the end, on the CPU; 0 for none. Meant for small models.
        sample_tokens: usize = 0;
        /// Prompt for sample-tokens.
        sample_prompt: String = String::new();
        /// Sampling temperature for sample-tokens; 0 always takes the most likely token.
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
