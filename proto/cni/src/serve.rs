//! From the process' environment and stdin to one document on stdout.
//!
//! Two documents on stdout break the runtime's decoder, so everything is decided first and
//! written once, at the end, here. VERSION is answered before anything else is read:
//! runtimes ask it before each call, with any stdin.

use std::{
    ffi::OsString,
    io::{Read, Write},
};

use serde_json::Value;

use crate::{
    Code, Command, Environment, Error, NetworkConfig, Request, Version,
    config::MAX_BYTES,
    error::MAX_TEXT_BYTES,
    text::{fit, list},
};

/// Exit status of a failed call.
pub const FAILED: u8 = 1;

/// Answers one call of the runtime and returns the exit status.
///
/// - `about`: one line for a person who runs the program by hand, without `CNI_COMMAND`;
/// - `get`: `std::env::var_os` but for tests;
/// - `plugin`: the work; `Some` is the result of an ADD, already in the asked version.
pub fn serve(
    about: &str,
    get: impl Fn(&str) -> Option<OsString>,
    stdin: impl Read,
    stdout: &mut impl Write,
    stderr: &mut impl Write,
    plugin: impl FnOnce(&Request) -> Result<Option<Value>, Error>,
) -> u8 {
    let Some(command) = get("CNI_COMMAND").filter(|text| !text.is_empty()) else {
        // A failed write to stderr cannot be reported either.
        let versions = list(Version::ALL);
        let about = format!("{about}\nCNI protocol versions supported: {versions}");
        let _ = writeln!(stderr, "{about}");
        return 0;
    };
    let mut version = Version::NEWEST;
    let command = Command::parse(&command.to_string_lossy());
    let answer = command.and_then(|command| match command {
        Command::Version => Ok(Some(Version::document())),
        command => call(command, get, stdin, &mut version, plugin),
    });
    match answer {
        Ok(None) => 0,
        Ok(Some(document)) => match write_once(stdout, &document) {
            Ok(()) => 0,
            Err(e) => {
                let _ = writeln!(stderr, "write the answer to stdout: {e}");
                FAILED
            }
        },
        Err(error) => {
            let _ = write_once(stdout, &error.to_json(version));
            FAILED
        }
    }
}

fn call(
    command: Command,
    get: impl Fn(&str) -> Option<OsString>,
    stdin: impl Read,
    version: &mut Version,
    plugin: impl FnOnce(&Request) -> Result<Option<Value>, Error>,
) -> Result<Option<Value>, Error> {
    let env = Environment::read(command, get)?;
    let mut raw = Vec::new();
    if let Err(e) = stdin.take(MAX_BYTES as u64 + 1).read_to_end(&mut raw) {
        let msg = format!("read network configuration from stdin: {e}");
        return Err(Error::new(Code::Io, msg));
    }
    if raw.len() > MAX_BYTES {
        let msg = format!("network configuration on stdin is longer than {MAX_BYTES} bytes");
        return Err(Error::new(Code::Decode, msg));
    }
    let parsed = match command {
        Command::Del | Command::Gc => NetworkConfig::parse_for_release(&raw),
        _ => NetworkConfig::parse(&raw),
    };
    let config = parsed.inspect_err(|_| *version = NetworkConfig::version_of(&raw))?;
    *version = config.version;
    let request = Request { env, config };
    request.command_exists_in_version()?;
    plugin(&request)
}

fn write_once(stdout: &mut impl Write, document: &Value) -> std::io::Result<()> {
    let mut text = document.to_string();
    text.push('\n');
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

/// Makes a panic write an error object, since an aborting one runs nothing else.
pub fn answer_panics() {
    std::panic::set_hook(Box::new(|info| {
        let msg = format_args!("internal error: {info}");
        let remedy = "please report this; DEL cleans up what was begun";
        let document = Error::advise(Code::Internal, msg, remedy).to_json(Version::NEWEST);
        let _ = write_once(&mut std::io::stdout().lock(), &document);
        let text = fit(&info.to_string(), MAX_TEXT_BYTES);
        let _ = writeln!(std::io::stderr().lock(), "{text}");
    }));
}

#[cfg(test)]
mod tests {
    use super::*;

    const NET: &str = r#"{"cniVersion":"0.4.0","name":"rail"}"#;

    fn run(
        pairs: &[(&str, &str)],
        stdin: &str,
        plugin: impl FnOnce(&Request) -> Result<Option<Value>, Error>,
    ) -> (u8, String, String) {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let get = |name: &str| {
            pairs
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| OsString::from(value))
        };
        let status = serve("about", get, stdin.as_bytes(), &mut out, &mut err, plugin);
        (
            status,
            String::from_utf8(out).unwrap(),
            String::from_utf8(err).unwrap(),
        )
    }

    fn untouched(_: &Request) -> Result<Option<Value>, Error> {
        panic!("must not be called")
    }

    #[test]
    fn failures_are_one_document_in_the_version_asked_for() {
        let del = [
            ("CNI_COMMAND", "DEL"),
            ("CNI_CONTAINERID", "c"),
            ("CNI_IFNAME", "net1"),
            ("CNI_PATH", "/opt/cni/bin"),
        ];
        let fails = |_: &Request| Err(Error::new(Code::TryAgain, "busy"));
        let (status, out, _) = run(&del, NET, fails);
        assert_eq!(status, FAILED);
        let document: Value = serde_json::from_str(&out).unwrap();
        assert_eq!(
            document,
            serde_json::json!({"cniVersion":"0.4.0","code":11,"msg":"busy"})
        );

        for (pairs, stdin, code) in [
            (&[("CNI_COMMAND", "FOO")][..], NET, 4),
            (&del[..3], NET, 4),
            (&del, "", 6),
            (&del, "{", 6),
            (&del, r#"{"cniVersion":"9.9.9","name":"a"}"#, 1),
            (&[("CNI_COMMAND", "GC"), del[3]], NET, 1),
        ] {
            let (status, out, _) = run(pairs, stdin, untouched);
            let document: Value = serde_json::from_str(&out).unwrap();
            assert_eq!(
                (status, &document["code"]),
                (FAILED, &serde_json::json!(code)),
                "{stdin}"
            );
        }
        let (status, out, _) = run(&del, NET, |_| Ok(None));
        assert_eq!((status, out.as_str()), (0, ""));
    }
}
