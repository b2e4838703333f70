//! Numbers at the limits of their types: each is used, or refused with a message.

use crate::support::Place;
use std::fs;

#[test]
fn every_seed_of_64_bits_is_kept_through_a_resume() {
    let place = Place::new();
    for (name, seed, written) in [
        ("half", "9223372036854775808", "seed = \"9223372036854775808\""),
        ("most", "18446744073709551615", "seed = \"18446744073709551615\""),
        ("small", "9223372036854775807", "seed = 9223372036854775807"),
    ] {
        place.run(name, &["--steps", "1", "--seed", seed]).succeeded();
        let config = place.run_folder(name).join("config.toml");
        let config = fs::read_to_string(config).expect("the run's config");
        assert!(config.lines().any(|line| line == written), "{config}");
        place.run(name, &["--steps", "2", "--seed", seed, "--resume"]).succeeded();
    }
    // Another seed is another run.
    let other = ["--steps", "3", "--seed", "9223372036854775809", "--resume"];
    place.run("half", &other).failed(2, &["seed was 9223372036854775808"]);
    // As a key of a config file, too.
    let config = fs::read_to_string(place.path().join("tiny.toml")).expect("a config");
    let config = config.replace("seed = 5", "seed = \"18446744073709551615\"");
    fs::write(place.path().join("text-seed.toml"), config).expect("a file");
    let events =
        crate::support::finish(place.command_of("text-seed.toml", "key", &["--steps", "1"]));
    let flag = place.run("flag", &["--steps", "1", "--seed", "18446744073709551615"]);
    assert_eq!(
        crate::support::losses(&events.succeeded()),
        crate::support::losses(&flag.succeeded())
    );
}

#[test]
fn sizes_that_no_machine_has_are_refused_in_words() {
    let place = Place::new();
    let check = |flags: &[&str], code: i32, parts: &[&str]| {
        place.run("a", flags).failed(code, parts);
    };
    let beyond = "9223372036854775808";
    for option in ["steps", "accumulate", "batch", "keep-last", "save-every", "warmup", "width"] {
        check(&[&format!("--{option}"), beyond], 2, &[option, beyond]);
    }
    for count in ["4294967295", "4294967296", "9223372036854775807"] {
        check(&["--accumulate", count], 3, &["data of one step", "accumulate"]);
        check(&["--accumulate", count, "--ram", "8000000000GB"], 3, &["data of one step"]);
        check(&["--tokens-per-step", count, "--accumulate", count], 2, &["tokens-per-step"]);
    }
    check(&["--width", "9223372036854775807"], 4, &["hidden_size"]);
    check(&["--group", "5000", "--accumulate", "5000"], 2, &["groups of 5000"]);
    // The data of a whole step counts: here some gigabytes, where the config allows 256 MiB.
    check(&["--accumulate", "1000000"], 3, &["data of one step takes", "256.00 MiB"]);
    check(&["--accumulate", "2000000", "--ram", "8GiB"], 2, &["micro-batches are too many"]);
}

#[test]
fn threads_are_counted_and_capped() {
    let place = Place::new();
    place.run("a", &["--threads", "100000"]).failed(2, &["100000", "at most 1024"]);
    place.run("a", &["--threads", "256"]).failed(3, &["threads = 256 takes", "256.00 MiB"]);
    place.run("a", &["--threads", "3", "--steps", "1"]).succeeded();
}
