//! Training under plans: whatever the memory decisions, every bit is that of everything resident.

mod amx;
mod batch_norm;
mod codec;
mod disk;
mod dropout;
mod evaluation;
mod exactness;
mod faults;
mod fp8;
mod lanes;
mod lora;
mod named_inputs;
mod programs;
mod random_plans;
mod rank_mutants;
mod ranks;
mod refused;
mod released;
mod stages;
mod support;
