//! Trains a two-layer model on a repeating sequence and shows the loss fall.

use storm_model::preset;
use storm_train::{Batch, Precision, ReferenceTrainer, TrainOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut config = preset("qwen3-0.6b")?;
    config.vocab_size = 32;
    config.hidden_size = 64;
    config.intermediate_size = 128;
    config.layer_count = 2;
    config.query_heads = 4;
    config.kv_heads = 2;
    config.head_dim = 16;

    let sequence = 16;
    let tokens: Vec<i32> = (0..2 * sequence).map(|i| (i * i % 31) as i32).collect();
    let targets: Vec<i32> = (1..=2 * sequence).map(|i| (i * i % 31) as i32).collect();
    let batch = Batch::new(tokens, targets, sequence);

    let mut trainer =
        ReferenceTrainer::new(&config, TrainOptions::new(2, sequence, Precision::F32))?;
    let mut losses = Vec::new();
    for step in 0..40 {
        let report = trainer.step(std::slice::from_ref(&batch), 3e-3)?;
        if step % 8 == 0 {
            println!("step {step:3}  loss {:.4}  norm {:.3}", report.loss, report.gradient_norm);
        }
        losses.push(report.loss);
    }
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert!(last < first / 2.0, "the loss should halve: {first} to {last}");
    Ok(())
}
