//! The checked-in protobuf code is what the proto files give.
//!
//! `RUNG_REGENERATE=1 cargo test -p rung-frontend --test codegen` rewrites it.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::{env, fs};

const FILE: &str = "rung.engine.v1.rs";

fn regenerate_wanted() -> bool {
    env::var_os("RUNG_REGENERATE").is_some_and(|value| value == "1")
}

fn generate() -> String {
    let protos = Path::new(env!("CARGO_MANIFEST_DIR")).join("../proto");
    let descriptors = protox::Compiler::new([&protos])
        .unwrap()
        .include_imports(true)
        .include_source_info(true)
        .open_file("rung/engine/v1/engine.proto")
        .unwrap()
        .file_descriptor_set();
    let out = tempfile::tempdir().unwrap();
    tonic_prost_build::configure()
        .out_dir(out.path())
        // Columns stay slices of the received frame.
        .bytes(".rung.engine.v1")
        .compile_fds(descriptors)
        .unwrap();
    fs::read_to_string(out.path().join(FILE)).unwrap()
}

#[test]
fn generated_code_is_current() {
    let checked_in = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/engine/gen").join(FILE);
    let generated = generate();
    if regenerate_wanted() {
        fs::create_dir_all(checked_in.parent().unwrap()).unwrap();
        fs::write(&checked_in, generated).unwrap();
        return;
    }
    let current = fs::read_to_string(&checked_in).unwrap();
    assert!(
        current == generated,
        "frontend/src/engine/gen/{FILE} differs from what proto/ gives: run `make proto` and commit the result"
    );
}
