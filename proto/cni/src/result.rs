//! What ADD answers, written and read in every version of the specification.
//!
//! | | 0.3.0 to 0.4.0 | 1.0.0, 1.1.0 |
//! |---|---|---|
//! | addresses | `ips` with `version` | `ips` |
//! | routes | `dst`, `gw` | all fields |
//! | interfaces | name, MAC, sandbox | and MTU, PCI address, socket |
//!
//! The fields that 1.1.0 added are written for 1.0.0 too, as the Go library does: runtimes
//! that do not know them pass over them.

use std::net::IpAddr;

use ipnetwork::IpNetwork;
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use serde_json::Value;

use crate::{Code, Error, Section, Version, json};

/// Reads an address with its prefix length; host bits are kept. The type's own reading takes an address
/// alone and a netmask as well.
///
/// # Errors
/// The text is neither.
pub fn cidr(text: &str) -> Result<IpNetwork, String> {
    let wrong = || format!("{text:?} is not an address with prefix length");
    let (_, prefix) = text.split_once('/').ok_or_else(wrong)?;
    let is_length = prefix.bytes().all(|byte| byte.is_ascii_digit());
    let read = is_length.then(|| text.parse().ok()).flatten();
    read.ok_or_else(wrong)
}

/// A network interface of a result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Interface {
    /// Its name in the namespace it is in.
    pub name: String,
    /// Its hardware address; none for devices without a netdev.
    pub mac: Option<String>,
    /// Its MTU in bytes.
    pub mtu: Option<u32>,
    /// The path of its namespace as the runtime gave it; none for the host's.
    pub sandbox: Option<String>,
    /// The socket of a vhost-user device.
    pub socket_path: Option<String>,
    /// The PCI address behind it.
    #[serde(rename = "pciID")]
    pub pci_id: Option<String>,
}

/// An address of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpConfig {
    /// The address with the prefix length of its network.
    #[serde(deserialize_with = "address")]
    pub address: IpNetwork,
    /// The gateway of that network.
    #[serde(default, deserialize_with = "optional")]
    pub gateway: Option<IpAddr>,
    /// The interface that has it, as an index into the result's interfaces.
    pub interface: Option<usize>,
}

/// A route of a result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The destination.
    #[serde(deserialize_with = "address")]
    pub dst: IpNetwork,
    /// The next hop; without one, the gateway of the first address of the family.
    #[serde(default, deserialize_with = "optional")]
    pub gw: Option<IpAddr>,
    /// The path MTU in bytes.
    pub mtu: Option<u32>,
    /// The TCP segment size to advertise, in bytes.
    pub advmss: Option<u32>,
    /// The metric.
    pub priority: Option<u32>,
    /// The routing table.
    pub table: Option<u32>,
    /// The scope as a number of rtnetlink (0 global, 253 link, 254 host).
    pub scope: Option<u8>,
}

impl Route {
    /// A route with only a destination and a next hop.
    pub fn via(dst: IpNetwork, gw: Option<IpAddr>) -> Self {
        Route {
            dst,
            gw,
            mtu: None,
            advmss: None,
            priority: None,
            table: None,
            scope: None,
        }
    }
}

/// Name resolution of a result; the runtime decides what becomes of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Servers, by preference.
    pub nameservers: Vec<String>,
    /// The local domain.
    pub domain: Option<String>,
    /// Domains to search.
    pub search: Vec<String>,
    /// Options of the resolver.
    pub options: Vec<String>,
}

impl Dns {
    /// Whether it says nothing.
    pub fn is_empty(&self) -> bool {
        *self == Dns::default()
    }
}

/// The answer to ADD, whatever the version it came in or goes out as.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CniResult {
    /// Interfaces, ours first where we made one.
    pub interfaces: Vec<Interface>,
    /// Addresses.
    pub ips: Vec<IpConfig>,
    /// Routes.
    pub routes: Vec<Route>,
    /// Name resolution.
    pub dns: Dns,
}

impl CniResult {
    /// Reads a result.
    ///
    /// `fallback` is the version of a result that names none; libcni has written such.
    ///
    /// # Errors
    /// Codes 1 and 6 for its version, code 7 naming the key that is wrong or an address
    /// whose interface does not exist.
    pub fn parse(value: &json::Value, fallback: Option<Version>) -> Result<Self, Error> {
        if *value == json::Value::Null {
            return Ok(CniResult::default());
        }
        let root = Section::of(value, String::new())
            .map_err(|_| Error::new(Code::Decode, "a result is a JSON object"))?;
        match (root.text("cniVersion")?, fallback) {
            (None, Some(_)) => {}
            (text, _) => drop(Version::parse(text.unwrap_or_default())?),
        }
        root.decode()
    }

    /// Checks that every address names an interface that is there.
    ///
    /// # Errors
    /// Code 7 naming the address.
    pub fn check_indexes(&self) -> Result<(), Error> {
        let count = self.interfaces.len();
        for ip in &self.ips {
            if let Some(index) = ip.interface.filter(|index| *index >= count) {
                let address = ip.address;
                let msg = format!("address {address} names interface {index} of {count}");
                return Err(Error::new(Code::InvalidConfig, msg));
            }
        }
        Ok(())
    }

    /// The document in a version.
    pub fn to_json(&self, version: Version) -> Value {
        let is_old = version < Version::V1_0_0;
        let mut answer = self.clone();
        if is_old {
            for interface in &mut answer.interfaces {
                (interface.mtu, interface.socket_path, interface.pci_id) = (None, None, None);
            }
            for route in &mut answer.routes {
                *route = Route::via(route.dst, route.gw);
            }
        }
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Document<'a> {
            cni_version: Version,
            #[serde(flatten)]
            result: &'a CniResult,
        }
        // Texts, numbers and lists: serialization does not fail.
        let mut document = serde_json::to_value(Document {
            cni_version: version,
            result: &answer,
        })
        .unwrap_or_default();
        if let Some(Value::Array(ips)) = document.get_mut("ips").filter(|_| is_old) {
            for (ip, of) in ips.iter_mut().zip(&answer.ips) {
                let family = if of.address.is_ipv6() { "6" } else { "4" };
                if let Value::Object(fields) = ip {
                    fields.insert("version".into(), family.into());
                }
            }
        }
        prune(&mut document);
        document
    }
}

/// Removes what says nothing.
fn prune(value: &mut Value) {
    match value {
        Value::Array(list) => list.iter_mut().for_each(prune),
        Value::Object(object) => {
            object.values_mut().for_each(prune);
            object.retain(|_, value| match value {
                Value::Null => false,
                Value::Array(list) => !list.is_empty(),
                Value::Object(object) => !object.is_empty(),
                _ => true,
            });
        }
        _ => {}
    }
}

/// An empty text counts as absent.
fn optional<'de, D: Deserializer<'de>>(from: D) -> Result<Option<IpAddr>, D::Error> {
    let text = Option::<String>::deserialize(from)?.filter(|text| !text.is_empty());
    let read = text.map(|text| text.parse()).transpose();
    read.map_err(|_| D::Error::custom("must be an address"))
}

fn address<'de, D: Deserializer<'de>>(from: D) -> Result<IpNetwork, D::Error> {
    let text = String::deserialize(from)?;
    cidr(&text).map_err(|_| D::Error::custom("must be an address with prefix length"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(value: &Value, fallback: Option<Version>) -> Result<CniResult, Error> {
        CniResult::parse(&json::parse(value.to_string()).unwrap(), fallback)
    }

    fn full() -> CniResult {
        CniResult {
            interfaces: vec![Interface {
                name: "net1".into(),
                mac: Some("02:00:00:00:00:01".into()),
                mtu: Some(9000),
                sandbox: Some("/run/netns/p".into()),
                socket_path: None,
                pci_id: Some("0000:3b:00.1".into()),
            }],
            ips: vec![
                IpConfig {
                    address: "10.1.0.5/16".parse().unwrap(),
                    gateway: Some("10.1.0.1".parse().unwrap()),
                    interface: Some(0),
                },
                IpConfig {
                    address: "fd00::5/64".parse().unwrap(),
                    gateway: None,
                    interface: Some(0),
                },
            ],
            routes: vec![Route {
                mtu: Some(4200),
                table: Some(100),
                scope: Some(0),
                ..Route::via(
                    "10.0.0.0/8".parse().unwrap(),
                    Some("10.1.0.1".parse().unwrap()),
                )
            }],
            dns: Dns {
                nameservers: vec!["10.0.0.53".into()],
                ..Dns::default()
            },
        }
    }

    #[test]
    fn each_version_has_its_own_shape() {
        let at = |version| full().to_json(version);
        let old = at(Version::V0_4_0);
        assert_eq!(old["ips"][0]["version"], "4");
        assert_eq!(old["ips"][1]["version"], "6");
        assert!(old["interfaces"][0].get("mtu").is_none());
        assert!(old["routes"][0].get("table").is_none());
        let new = at(Version::V1_1_0);
        assert!(new["ips"][0].get("version").is_none());
        assert_eq!(new["ips"][0]["interface"], 0);
        assert_eq!(new["interfaces"][0]["mtu"], 9000);
        assert_eq!(new["interfaces"][0]["pciID"], "0000:3b:00.1");
        assert_eq!(new["routes"][0]["table"], 100);
    }

    #[test]
    fn what_is_written_is_read_again() {
        for version in [Version::V1_0_0, Version::V1_1_0] {
            let read = parse(&full().to_json(version), None).unwrap();
            assert_eq!(read, full());
        }
        for version in [Version::V0_3_0, Version::V0_3_1, Version::V0_4_0] {
            let written = full().to_json(version);
            let read = parse(&written, None).unwrap();
            assert_eq!(read.to_json(version), written);
            assert_eq!(read.ips, full().ips);
        }
    }

    #[test]
    fn go_key_case_is_read() {
        let value = json!({"CNIVersion": "1.0.0", "IPs": [{"Address": "10.0.0.1/24", "Interface": 0}],
                           "Interfaces": [{"Name": "a", "Sandbox": "/n"}], "dns": null});
        let read = parse(&value, None).unwrap();
        assert_eq!(read.ips[0].interface, Some(0));
        assert_eq!(read.interfaces[0].name, "a");
        assert_eq!(parse(&Value::Null, None).unwrap(), CniResult::default());
    }

    #[test]
    fn an_address_on_no_interface_is_refused() {
        let mut result = full();
        assert!(result.check_indexes().is_ok());
        result.ips[1].interface = Some(1);
        assert!(
            result
                .check_indexes()
                .unwrap_err()
                .msg
                .contains("fd00::5/64")
        );
    }

    #[test]
    fn wrong_values_are_named() {
        let refused = |value: Value| parse(&value, Some(Version::V1_0_0)).unwrap_err();
        assert_eq!(
            refused(json!({"ips": [{"address": "10.0.0.1"}]})).msg,
            "ips[0].address: must be an address with prefix length, found the string \"10.0.0.1\""
        );
        assert_eq!(
            refused(json!({"ips": [{}]})).msg,
            "ips[0].address: is missing"
        );
        assert_eq!(refused(json!([])).code, Code::Decode);
        for version in ["3.0.0", "0.2.0"] {
            let error = refused(json!({"cniVersion": version, "ip4": {"ip": "10.0.0.1/24"}}));
            assert_eq!(error.code, Code::IncompatibleVersion);
        }
    }

    #[test]
    fn prefixes_are_checked() {
        for text in [
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/",
            "10.0.0.0/+8",
            "10.0.0.0",
            "10.0.0.0/255.0.0.0",
            "/8",
            "a/8",
        ] {
            assert!(cidr(text).is_err(), "{text}");
        }
        assert_eq!(cidr("10.1.2.3/16").unwrap().to_string(), "10.1.2.3/16");
    }
}
