//! The process that runs third-party tokenizer code, for programs that cannot start themselves again.

fn main() -> std::io::Result<()> {
    storm_data::tokenize_worker()
}
