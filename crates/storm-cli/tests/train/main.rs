//! `storm train`, called as people call it, and killed as machines do.

mod afterwards;
mod chat;
mod codec;
mod disk;
mod early;
mod figures;
mod folder;
mod init;
mod json;
mod lanes;
mod length;
mod lengths;
mod lora;
mod loss;
mod moments;
mod no_threads;
mod non_finite;
mod numbers;
mod predict;
mod ranks;
mod runs;
mod sgd;
mod support;
mod tokenizers;
mod update;
mod weights;
