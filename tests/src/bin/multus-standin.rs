//! A CNI plugin that does for a node's pods what Multus does; see [`e2e::multus`].

#![forbid(unsafe_code)]

use std::io::Read;
use std::process::ExitCode;

use e2e::multus::{Call, error_object, run};

fn main() -> ExitCode {
    let call = Call::from_env();
    let mut stdin = Vec::new();
    let read = if call.command == "VERSION" {
        Ok(0)
    } else {
        std::io::stdin().read_to_end(&mut stdin)
    };
    let answer = read
        .map_err(anyhow::Error::from)
        .and_then(|_| run(&call, &stdin));
    let (document, code) = match answer {
        Ok(document) => (document, ExitCode::SUCCESS),
        Err(error) => (Some(error_object(&error)), ExitCode::FAILURE),
    };
    if let Some(document) = document {
        say(&document);
    }
    code
}

#[expect(clippy::print_stdout, reason = "a CNI plugin answers on stdout")]
fn say(document: &serde_json::Value) {
    println!("{document}");
}
