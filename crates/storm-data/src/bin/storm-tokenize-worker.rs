//! The process that runs foreign tokenizer code, for programs that cannot start themselves again.

fn main() -> std::io::Result<()> {
    storm_data::tokenize_worker()
}
