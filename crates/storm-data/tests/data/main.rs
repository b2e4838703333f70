//! Packing and loading.

mod helpers;
mod loading;
