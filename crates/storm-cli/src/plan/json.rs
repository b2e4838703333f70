//! A plan as a JSON object.

use super::ranks;
use super::request::{Answer, Request};
use super::words::{self, Shares, hidden_share};
use crate::codec::CodecArg;
use serde_json::{Value, json};
use storm_plan::{Holding, Prediction, Queue, Storage, Streaming, Tier, TooSmall};
use storm_train::StepSize;

pub(super) fn answer(request: &Request, answer: &Answer) -> Value {
    let planned = &answer.planned;
    let mut object = figures(request, answer, &planned.prediction);
    let shares = Shares::of(answer);
    let policies: Vec<Value> = answer
        .policies
        .iter()
        .map(|policy| {
            let mut object = match &policy.prediction {
                Some(prediction) => figures(request, answer, prediction),
                None => json!({"feasible": false}),
            };
            object["name"] = json!(policy.name);
            object["description"] = json!(policy.description);
            object
        })
        .collect();
    let what_if: Vec<Value> = answer
        .what_if
        .iter()
        .map(|other| {
            let mut object = figures(request, answer, &other.prediction);
            object["option"] = json!(other.option);
            object
        })
        .collect();
    extend(&mut object, about(request));
    if let Some(disk) = &request.disk {
        object["disk"] = disk.json(Some(planned));
    }
    extend(
        &mut object,
        json!({
            "vram_min_bytes": planned.vram_min_bytes,
            "batch": answer.batch,
            "accumulate": answer.accumulate,
            "group": planned.decisions.usual_group().micro_batches,
            "first_group": planned.decisions.groups[0].micro_batches,
            request.config.unit().per_step_key(): answer.units_per_step(request),
            "micro_batches_tried": tried(answer),
            "hidden_fraction": hidden_share(answer),
            "activations": {
                "kept_fraction": shares.kept,
                "offloaded_fraction": shares.offloaded,
                "recomputed_fraction": shares.recomputed,
            },
            "saved_units": saved_units(answer),
            "tensors": tensors(answer),
            "ranks": ranks::object(request, answer),
            "instructions": planned.plan.instructions.len(),
            "decisions": planned.decisions,
            "placement": placement(answer),
            "checkpoint": checkpoint(request, answer),
            "policies": policies,
            "what_if": what_if,
            "limited_by": answer.planned.bottleneck().name(),
            "summary": words::summary(request, answer),
            "planning_seconds": answer.planning_seconds,
        }),
    );
    object
}

pub(super) fn infeasible(request: &Request, problem: &TooSmall) -> Value {
    let mut object = json!({
        "feasible": false,
        "vram_min_bytes": problem.min_bytes[Tier::DEVICE],
        "ram_min_bytes": problem.min_bytes[Tier::HOST] + request.reserved_bytes(),
        "largest_consumers": problem
            .consumers
            .iter()
            .map(|(name, bytes)| json!({"name": name, "bytes": bytes}))
            .collect::<Vec<_>>(),
    });
    extend(&mut object, about(request));
    match request.step {
        StepSize::MicroBatches(accumulate) => {
            extend(&mut object, json!({"batch": request.options.batch, "accumulate": accumulate}));
        }
        StepSize::Tokens(tokens) => object["tokens_per_step"] = json!(tokens),
    }
    object
}

/// The request.
fn about(request: &Request) -> Value {
    json!({
        "model": request.model,
        "parameters": request.config.parameter_count(),
        "sequence": request.options.sequence,
        "activation_codec": CodecArg::from(request.options.activation_codec),
        "hardware": request.profile.name,
        "hardware_source": request.profile.source,
        "hardware_uncertainty": request.profile.uncertainty,
        "vram_bytes": request.vram.bytes,
        "ram_bytes": request.ram.bytes,
        "predict_bytes": request.predict_bytes,
        "disk": request.disk.as_ref().map(|disk| disk.json(None)),
    })
}

/// Figures of a plan or a policy.
fn figures(request: &Request, answer: &Answer, prediction: &Prediction) -> Value {
    let Prediction { busy, copied_bytes, .. } = prediction;
    json!({
        "feasible": true,
        "vram_peak_bytes": prediction.peak_bytes[Tier::DEVICE],
        "ram_peak_bytes": prediction.peak_bytes[Tier::HOST],
        "step_seconds": prediction.step_seconds,
        request.config.unit().per_second_key():
            answer.units_per_second(request, prediction.step_seconds),
        "compute_busy": busy[Queue::COMPUTE],
        "h2d_busy": busy[Queue::HOST_TO_DEVICE],
        "d2h_busy": busy[Queue::DEVICE_TO_HOST],
        "recompute_fraction": prediction.recompute_fraction,
        "recompute_flops": prediction.recompute_flops,
        "h2d_bytes": copied_bytes[Queue::HOST_TO_DEVICE],
        "d2h_bytes": copied_bytes[Queue::DEVICE_TO_HOST],
    })
}

fn tried(answer: &Answer) -> Vec<Value> {
    let tried = answer.tried.iter().map(|tried| {
        json!({
            "batch": tried.batch,
            "accumulate": tried.accumulate,
            "guessed_step_seconds": tried.guessed_seconds,
        })
    });
    tried.collect()
}

/// Bytes of each kind of tensor, stored and copied.
fn tensors(answer: &Answer) -> Vec<Value> {
    let holding = |holding: Holding| {
        json!({
            "kind": holding.kind,
            "device_bytes": holding.bytes[Tier::DEVICE],
            "host_bytes": holding.bytes[Tier::HOST],
            "h2d_bytes": holding.copied_bytes[Queue::HOST_TO_DEVICE],
            "d2h_bytes": holding.copied_bytes[Queue::DEVICE_TO_HOST],
        })
    };
    answer.planned.plan.holdings().into_iter().map(holding).collect()
}

/// Number of layers that keep, offload, and recompute each unit.
fn saved_units(answer: &Answer) -> Vec<Value> {
    let decisions = &answer.planned.decisions;
    let saved = &decisions.usual_group().stages[words::layers(decisions)].saved;
    let unit = |(index, unit): (usize, &storm_plan::SavedUnit)| {
        let count = |wanted: Storage| saved.iter().filter(|s| s[index] == wanted).count();
        json!({
            "name": unit.name,
            "bytes": unit.size_bytes,
            "layers_kept": count(Storage::Keep),
            "layers_offloaded": count(Storage::Offload),
            "layers_recomputed": count(Storage::Recompute),
        })
    };
    answer.units.iter().enumerate().map(unit).collect()
}

fn checkpoint(request: &Request, answer: &Answer) -> Value {
    let saving = request.saving(&answer.planned.prediction);
    json!({
        "disk_bytes": request.checkpoint_bytes,
        "snapshot_bytes": saving.snapshot_bytes(request),
        "saved": saving.name(),
    })
}

fn placement(answer: &Answer) -> Value {
    let decisions = &answer.planned.decisions;
    let (layers, count) =
        (&decisions.stages[words::layers(decisions)], words::layer_count(decisions));
    let states = Streaming { pinned: layers.states_pinned, ring: decisions.state_ring };
    json!({
        "weights": words::placement(layers.weights, count),
        "gradients": words::placement(layers.gradients, count),
        "optimizer_state": words::placement(states, count),
        "rings": decisions.rings,
        "update": decisions.update,
    })
}

fn extend(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
}
