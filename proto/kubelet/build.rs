//! Generates the gRPC code with protox, so that no protoc is needed.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let api = Path::new(env!("CARGO_MANIFEST_DIR")).join("api");
    println!("cargo::rerun-if-changed={}", api.display());
    let descriptors = protox::compile(
        [
            "deviceplugin.proto",
            "pluginregistration.proto",
            "podresources.proto",
            "runtime.proto",
        ],
        [&api],
    )?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
