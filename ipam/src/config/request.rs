//! Requests for one address: `runtimeConfig.ips`, else `args.cni.ips`, else
//! `IP` of `CNI_ARGS`.

use crate::range;
use cni_wire::{Code, Error, Request, Section};
use node::policy::Profile;

/// Who asked for an address; for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Runtime,
    Annotation,
    /// `CNI_ARGS`, by the runtime of old.
    CniArgs,
}

impl Source {
    /// As the key is called.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Runtime => "runtimeConfig.ips",
            Self::Annotation => "args.cni.ips",
            Self::CniArgs => "CNI_ARGS IP",
        }
    }
}

/// The addresses that one ADD asks for, each in place of one that would be chosen from the range it lies
/// in; with a prefix length where one was written.
///
/// # Errors
/// Code 7, or 4 for `CNI_ARGS`, naming the text that is not an address.
pub fn requested(
    request: &Request,
    profile: Profile,
) -> Result<Vec<(range::IpAddrWithLength, Source)>, Error> {
    for (section, source) in [
        (request.config.runtime_config()?, Source::Runtime),
        (request.config.cni_args()?, Source::Annotation),
    ] {
        let asked = list(&section, source, profile)?;
        if !asked.is_empty() {
            return Ok(asked);
        }
    }
    let text = request.env.args.get("IP");
    let texts = text.into_iter().flat_map(|text| text.split(','));
    let asked = texts.map(|text| {
        let asked = with_length(text, profile).map(|ip| (ip, Source::CniArgs));
        asked.ok_or_else(|| wrong(text))
    });
    asked.collect()
}

fn list(
    section: &Section<'_>,
    source: Source,
    profile: Profile,
) -> Result<Vec<(range::IpAddrWithLength, Source)>, Error> {
    let texts: Vec<String> = section.get("ips")?.unwrap_or_default();
    texts
        .iter()
        .map(|text| {
            with_length(text, profile)
                .map(|ip| (ip, source))
                .ok_or_else(|| section.wrong("ips", format_args!("{text:?} is not an address")))
        })
        .collect()
}

/// An address, with the prefix length if one is written; in the strict profile without
/// leading zeros.
fn with_length(text: &str, profile: Profile) -> Option<range::IpAddrWithLength> {
    let strict = profile == Profile::Strict;
    range::with_length(text).filter(|_| !(strict && range::has_leading_zero(text)))
}

fn wrong(text: &str) -> Error {
    Error::new(
        Code::InvalidEnvironment,
        format!("CNI_ARGS IP: {text:?} is not an address"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni_wire::{Command, Environment, NetworkConfig, env::Args};

    fn read(
        config: &str,
        args: &str,
        profile: Profile,
    ) -> Result<Vec<(range::IpAddrWithLength, Source)>, Error> {
        let request = Request {
            env: Environment {
                command: Command::Add,
                attachment: None,
                netns: None,
                args: Args::parse(args).unwrap(),
                path: Vec::new(),
                netns_override: false,
            },
            config: NetworkConfig::parse(config.as_bytes()).unwrap(),
        };
        requested(&request, profile)
    }

    #[test]
    fn the_runtime_comes_before_the_annotation_before_cni_args() {
        let both = r#"{"cniVersion":"1.0.0","name":"a","runtimeConfig":{"ips":["10.0.0.5"]},"args":{"cni":{"ips":["10.0.0.6/24","fd00::6"]}}}"#;
        let one = r#"{"cniVersion":"1.0.0","name":"a","runtimeConfig":{"ips":[]},"args":{"cni":{"ips":["10.0.0.6/24","fd00::6"]}}}"#;
        for (config, address, length, source, count) in [
            (both, "10.0.0.5", None, Source::Runtime, 1),
            (one, "10.0.0.6", Some(24), Source::Annotation, 2),
            (
                r#"{"cniVersion":"1.0.0","name":"a"}"#,
                "10.0.0.7",
                None,
                Source::CniArgs,
                1,
            ),
        ] {
            let requested = read(config, "IP=10.0.0.7", Profile::Strict).unwrap();
            assert_eq!(requested.len(), count);
            let ((ip, prefix), from) = requested[0];
            assert_eq!(
                (ip.to_string().as_str(), prefix, from),
                (address, length, source)
            );
        }
    }

    #[test]
    fn what_is_not_an_address_is_named() {
        let bare = r#"{"cniVersion":"1.0.0","name":"a"}"#;
        let error = read(bare, "IP=x/24", Profile::Compatible).unwrap_err();
        assert_eq!(error.code, Code::InvalidEnvironment);
        for padded in ["IP=10.0.0.030", "IP=10.0.0.3/024"] {
            assert!(read(bare, padded, Profile::Strict).is_err(), "{padded}");
        }
        assert!(read(bare, "IP=10.0.0.300", Profile::Strict).is_err());
        assert!(
            read(
                r#"{"cniVersion":"1.0.0","name":"a","runtimeConfig":{"ips":["x"]}}"#,
                "",
                Profile::Strict
            )
            .is_err()
        );
    }
}
