//! Requests for one address: `runtimeConfig.ips`, else `args.cni.ips`, else
//! `IP` of `CNI_ARGS`.

use crate::range;
use cni_wire::{Cidr, Code, Error, IpConfig, Request, Section};
use node::policy::Profile;

/// Who asked for an address; for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    Runtime,
    Annotation,
    /// `CNI_ARGS`, by the runtime of old.
    CniArgs,
}

/// The addresses one ADD asks for.
#[derive(Debug, Clone, Default)]
pub struct Requested {
    /// To be given in place of a chosen one, each from the range it lies in;
    /// prefix length only where one was written.
    pub instead: Vec<(range::IpAddrWithLength, Source)>,
    /// To be given besides: whereabouts' meaning of `CNI_ARGS`.
    pub besides: Vec<IpConfig>,
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

impl Requested {
    /// Reads the requests by their order of precedence.
    ///
    /// # Errors
    /// Code 7, or 4 for `CNI_ARGS`, naming the text that is not an address.
    pub fn read(request: &Request, profile: Profile) -> Result<Self, Error> {
        for (section, source) in [
            (request.config.runtime_config()?, Source::Runtime),
            (request.config.cni_args()?, Source::Annotation),
        ] {
            let instead = list(&section, source, profile)?;
            if !instead.is_empty() {
                return Ok(Self {
                    instead,
                    besides: Vec::new(),
                });
            }
        }
        let Some(text) = request.env.args.get("IP") else {
            return Ok(Self::default());
        };
        if profile == Profile::Compatible {
            let besides = vec![appended(text, request.env.args.get("GATEWAY"))?];
            return Ok(Self {
                instead: Vec::new(),
                besides,
            });
        }
        let instead = text
            .split(',')
            .map(|text| {
                with_length(text, profile)
                    .map(|ip| (ip, Source::CniArgs))
                    .ok_or_else(|| wrong(text))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            instead,
            besides: Vec::new(),
        })
    }
}

fn list(
    section: &Section<'_>,
    source: Source,
    profile: Profile,
) -> Result<Vec<(range::IpAddrWithLength, Source)>, Error> {
    section
        .texts("ips")?
        .into_iter()
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

fn appended(address: &str, gateway: Option<&str>) -> Result<IpConfig, Error> {
    let address: Cidr = address.parse().map_err(|_| {
        wrong(address)
            .with_details("the compatible profile wants a prefix length, as in 10.0.0.5/24")
    })?;
    let gateway = match gateway {
        None => None,
        Some(text) => Some(range::address(text).ok_or_else(|| {
            Error::new(
                Code::InvalidEnvironment,
                format!("CNI_ARGS GATEWAY: {text:?} is not an address"),
            )
        })?),
    };
    Ok(IpConfig {
        address,
        gateway,
        interface: None,
    })
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

    fn read(config: &str, args: &str, profile: Profile) -> Result<Requested, Error> {
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
        Requested::read(&request, profile)
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
            assert_eq!(requested.instead.len(), count);
            let ((ip, prefix), from) = requested.instead[0];
            assert_eq!(
                (ip.to_string().as_str(), prefix, from),
                (address, length, source)
            );
            assert!(requested.besides.is_empty());
        }
    }

    #[test]
    fn the_compatible_profile_appends_what_cni_args_say() {
        let bare = r#"{"cniVersion":"1.0.0","name":"a"}"#;
        let args = "IP=10.0.0.7/24;GATEWAY=10.0.0.1";
        let requested = read(bare, args, Profile::Compatible).unwrap();
        assert!(requested.instead.is_empty());
        assert_eq!(requested.besides[0].address.to_string(), "10.0.0.7/24");
        assert_eq!(
            requested.besides[0].gateway,
            Some("10.0.0.1".parse().unwrap())
        );
        for args in ["IP=10.0.0.7", "IP=x/24", "IP=10.0.0.7/24;GATEWAY=x"] {
            let error = read(bare, args, Profile::Compatible).unwrap_err();
            assert_eq!(error.code, Code::InvalidEnvironment, "{args}");
        }
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
