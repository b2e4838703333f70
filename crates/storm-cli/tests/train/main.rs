//! `storm train`, called as people call it, and killed as machines do.

mod afterwards;
mod bench_predict;
mod chat;
mod codec;
mod disk;
mod early;
mod figures;
mod folder;
mod init;
mod json;
mod length;
mod lengths;
mod lora;
mod loss;
mod moments;
mod no_threads;
mod non_finite;
mod numbers;
mod predict;
mod runs;
mod sgd;
mod support;
mod tokenizers;
mod update;
mod weights;
