//! `devices` and `names`: whether an attachment is one NIC of its pod or all of them, and what its
//! interfaces are called. Pure.

use cni_wire::{Error, IfName};
use serde::Deserialize;

cni_wire::words! {
    /// Which of a pod's units an attachment is made of.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum Devices {
        /// The one that the runtime names.
        #[default]
        One = "one",
        /// Every one of its resource.
        All = "all",
    }
}

/// The pattern of the interfaces' names, checked.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Names(String);

/// What the names are unless the network says otherwise.
const DEFAULT: &str = "{ifname}-{rail}";

impl Default for Names {
    fn default() -> Self {
        Names(DEFAULT.to_owned())
    }
}

impl TryFrom<String> for Names {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let is_distinct = text.contains("{rail}") || text.contains("{host}");
        let names = Names(text);
        let shortest = names.name("x", 0, "x");
        // A network that no node can use is refused before one is asked.
        match IfName::parse(&shortest) {
            _ if shortest.contains(['{', '}']) => Err(format!(
                "makes {shortest:?}: the placeholders are {{ifname}}, {{rail}} and {{host}}"
            )),
            _ if !is_distinct => {
                Err("makes one name for all interfaces: add {rail} or {host}".to_owned())
            }
            Err(reason) => Err(format!("makes {shortest:?} at the shortest: {reason}")),
            Ok(_) => Ok(names),
        }
    }
}

impl Names {
    fn name(&self, ifname: &str, rail: u32, host: &str) -> String {
        let name = self.0.replace("{rail}", &rail.to_string());
        name.replace("{host}", host).replace("{ifname}", ifname)
    }

    /// The name of one interface: on a rail, of the netdev that the host calls `host`.
    ///
    /// # Errors
    /// Code 7: it is not a name for an interface.
    pub fn of(&self, ifname: &str, rail: u32, host: &str) -> Result<IfName, Error> {
        let name = self.name(ifname, rail, host);
        IfName::parse(&name).map_err(|reason| {
            let msg = format!("names: {:?} makes {name:?} of {host}: {reason}", self.0);
            super::invalid(msg, "choose a shorter pattern, such as \"r{rail}\"")
        })
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use cni_wire::Code;

    use super::*;

    fn named(pattern: &str, rail: u32) -> Result<String, Error> {
        let names = Names::try_from(pattern.to_owned()).unwrap();
        let name = names.of("net1", rail, "enp59s0np0")?;
        Ok(name.as_str().to_owned())
    }

    #[test]
    fn a_pattern_makes_a_name_for_each_interface() {
        assert_eq!(Names::try_from(DEFAULT.to_owned()), Ok(Names::default()));
        assert_eq!(named(DEFAULT, 7).unwrap(), "net1-7");
        assert_eq!(named("{host}", 7).unwrap(), "enp59s0np0");
        assert_eq!(named("rdma{rail}", 12).unwrap(), "rdma12");
        assert_eq!(named("{rail}x{rail}", 1).unwrap(), "1x1");
    }

    #[test]
    fn a_name_that_the_kernel_refuses_is_refused_before() {
        for (pattern, rail) in [("{ifname}--{host}", 0), ("12345678901234{rail}", 10)] {
            let error = named(pattern, rail).unwrap_err();
            assert_eq!(error.code, Code::InvalidConfig);
            assert!(
                error.msg.starts_with("names: ") && !error.details.is_empty(),
                "{error}"
            );
        }
        assert_eq!(named("12345678901234{rail}", 1).unwrap().len(), 15);
    }

    #[test]
    fn a_pattern_that_cannot_be_meant_is_refused() {
        for (pattern, part) in [
            ("net", "add {rail} or {host}"),
            ("", "add {rail} or {host}"),
            ("{ifname}", "add {rail} or {host}"),
            ("{rails}", "\"{rails}\""),
            ("{rail", "placeholders"),
            ("rail}", "placeholders"),
            ("{}", "\"{}\""),
            ("a/{rail}", "\"a/0\" at the shortest"),
            ("a b{rail}", "at the shortest"),
            ("123456789012345{rail}", "at the shortest"),
        ] {
            let reason = Names::try_from(pattern.to_owned()).unwrap_err();
            assert!(reason.contains(part), "{pattern}: {reason}");
        }
    }
}
