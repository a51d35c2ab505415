//! Generates the runtime interface's client with protox, so that no protoc is needed.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let api = Path::new(env!("CARGO_MANIFEST_DIR")).join("api");
    println!("cargo::rerun-if-changed={}", api.display());
    let descriptors = protox::compile(["cri.proto"], [&api])?;
    tonic_prost_build::configure()
        .build_server(true)
        .compile_fds(descriptors)?;
    Ok(())
}
