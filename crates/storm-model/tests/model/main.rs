//! Tests of `storm-model`: presets, config.json, safetensors, directories, and the way there and back.
//!
//! | module | what belongs there |
//! |---|---|
//! | `presets` | published models by name |
//! | `config_json` | what config.json may say, and what it may not |
//! | `safetensors` | one file: honest, damaged, hostile |
//! | `directory` | files, links, shards, pickles, tensors that do not fit |
//! | `round_trip` | save and open again |
//! | `outputs` | what saving never replaces, and what a killed one leaves |
//! | `unusual` | files as other programs leave them: wide weights, wrapped names, adapters, no head |
//! | `quantized` | weights in 8 and 4 bits of other libraries: what they stand for, and damage |
//! | `lora` | adapters: which modules they are for, and PEFT's directories |
//! | `support` | models to test with, and a meter for memory |

mod config_json;
mod directory;
mod lora;
mod outputs;
mod presets;
mod quantized;
mod round_trip;
mod safetensors;
mod support;
mod unusual;
