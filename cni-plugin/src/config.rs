//! What a network configuration asks of this plugin, beyond the keys all plugins share.
//!
//! Keys have the names of the reference plugins for each kind of attachment. A wrong value is
//! refused by name before anything is read. A key without effect here is refused or noted: by [`keys`],
//! and by [`kinds`] where it has an effect for other kinds of attachment.

mod attach;
mod devices;
mod keys;
mod kinds;
pub(crate) mod vf;

pub use crate::rdma::RdmaRequirement;
pub use attach::{Attach, ChildKind};
pub use devices::{Devices, Names};
pub use keys::all as keys;

use std::{collections::BTreeMap, fmt};

use attachment::{
    journal::Slot,
    netdev::vf::{LinkState, Protocol, VfSettings},
};
use cni_wire::{
    Code, Error, KNOWN_ARGS, Request, Section,
    json::{self, Value},
    text::list,
};
use hca::{Guid, HcaId, MacAddress, ParseError, PciAddress, UnitId};
use node::policy::{MAX_RAIL, MAX_VLAN, partition_key, port_guid};
use serde::{
    Deserialize, Deserializer,
    de::{DeserializeOwned, Error as _, IntoDeserializer},
};

use crate::source_routing::SourceRouting;

/// Which netdev of the host is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// `device`, `master`: by its name or an alternative name.
    Name(String),
    /// `hwaddr`: by its present or permanent MAC address.
    Mac(MacAddress),
    /// `kernelpath`: by a directory below `/sys/devices`.
    KernelPath(String),
    /// `rdmaDevice`: the netdev of an RDMA device.
    RdmaDevice(String),
    /// `pciBusID`, `deviceID`: the netdev of a PCI function, a sub-function or a GUID.
    Hca(HcaId),
}

/// The device ID that the device plugin gave out and Multus handed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    pub unit: UnitId,
    pub text: String,
}

/// A unit of the pod, and what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitHcas {
    /// As messages name it.
    pub text: String,
    /// One HCA, or for `rdma-only` all of the units; none where that is not known.
    pub hcas: Vec<HcaId>,
    /// The slot that was bound to it.
    pub slot: Option<Slot>,
}

/// What the network asks for. Fields that are not skipped are keys as they are written.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Config {
    #[serde(skip)]
    pub attach: Attach,
    /// `device`, `hwaddr`, `kernelpath`, `pciBusID`, `rdmaDevice`: the first of them.
    #[serde(skip)]
    pub device: Option<Target>,
    /// The netdev below a child.
    pub master: Option<String>,
    /// Which of the pod's units it is made of.
    pub devices: Devices,
    /// The names of several interfaces.
    #[serde(skip)]
    pub names: Names,
    /// `deviceID`.
    #[serde(skip)]
    pub allocation: Option<Allocation>,
    /// From 1: which netdev of a PCI function that has several.
    #[serde(deserialize_with = "not_zero")]
    pub port: Option<u32>,
    /// As written.
    pub mode: Option<String>,
    /// In bytes.
    #[serde(deserialize_with = "mtu")]
    pub mtu: Option<u32>,
    /// By the runtime, the pod or the configuration.
    #[serde(skip)]
    pub mac: Option<MacAddress>,
    /// What is set of a VF through its PF; the GUID of an InfiniBand VF is by the runtime, the pod or
    /// the configuration.
    #[serde(skip)]
    pub vf: VfSettings,
    /// In packets.
    #[serde(rename = "bcqueuelen", deserialize_with = "not_zero")]
    pub broadcast_queue: Option<u32>,
    /// The partition of an IPoIB child, with the membership bit.
    #[serde(skip)]
    pub pkey: Option<u16>,
    /// Of an IPoIB child; absent means true.
    #[serde(rename = "umcast")]
    pub user_multicast: Option<bool>,
    /// Whether the interface has an IPv6 link-local address; absent means only beside another IPv6
    /// address.
    pub link_local: Option<bool>,
    /// Whether router advertisements are followed.
    #[serde(rename = "acceptRA")]
    pub accept_ra: bool,
    /// Whether duplicate address detection runs (ADD does not wait for it).
    pub dad: bool,
    /// The rail of the fabric that its NIC must be on.
    #[serde(deserialize_with = "up_to::<_, _, MAX_RAIL>")]
    pub rail: Option<u32>,
    #[serde(skip)]
    pub source_routing: SourceRouting,
    /// What becomes of the RDMA devices.
    #[serde(skip)]
    pub rdma: RdmaRequirement,
    /// `runtimeConfig.CNIDeviceInfoFile`.
    #[serde(skip)]
    pub device_info: Option<String>,
    /// What of the configuration has no effect, as sentences.
    #[serde(skip)]
    pub notes: Vec<String>,
}

/// The other keys, of which something is derived.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Keys {
    attach: Option<Attach>,
    device: Option<String>,
    #[serde(rename = "deviceID")]
    device_id: Option<String>,
    guid: Option<String>,
    hwaddr: Option<String>,
    ib_kubernetes_enabled: bool,
    kernelpath: Option<String>,
    #[serde(rename = "link_state", deserialize_with = "word")]
    link_state: Option<LinkState>,
    mac: Option<String>,
    #[serde(rename = "max_tx_rate")]
    max_tx_rate: Option<u32>,
    #[serde(rename = "min_tx_rate")]
    min_tx_rate: Option<u32>,
    names: Option<Names>,
    #[serde(rename = "pciBusID")]
    pci_bus_id: Option<String>,
    pkey: Option<Value>,
    rdma: Option<RdmaRequirement>,
    rdma_device: Option<String>,
    source_routing: Option<Value>,
    #[serde(deserialize_with = "word")]
    spoofchk: Option<vf::Switch>,
    #[serde(deserialize_with = "word")]
    trust: Option<vf::Switch>,
    r#type: Option<String>,
    #[serde(deserialize_with = "up_to::<_, _, { MAX_VLAN as u32 }>")]
    vlan: Option<u16>,
    #[serde(deserialize_with = "word")]
    vlan_proto: Option<Protocol>,
    #[serde(rename = "vlanQoS", deserialize_with = "up_to::<_, _, 7>")]
    vlan_qos: Option<u8>,
}

/// Keys that every plugin has.
const SHARED: &str = "args capabilities cniVersion dns ipam name prevResult runtimeConfig";

/// The `type` under which the RDMA CNI plugin is installed. In its place this one does what that does.
const RDMA_CNI: &str = "rdma";

impl Config {
    /// Reads the keys of a request. `pkeys` are the partitions that the node's policy names.
    ///
    /// # Errors
    /// Code 7 (code 4 for `CNI_ARGS`) naming key and value, or a key that resembles one of ours;
    /// code 2 for a value that belongs to another kind of attachment or is not supported.
    pub fn read(request: &Request, pkeys: &BTreeMap<String, u16>) -> Result<Config, Error> {
        request.env.args.allow_only(&KNOWN_ARGS)?;
        let (root, runtime) = (request.config.root(), request.config.runtime_config()?);
        let pod = request.config.cni_args()?;
        let mut added = vec![&runtime];
        // In a chain the pod's arguments may be another plugin's.
        added.extend(root.value("prevResult").is_none().then_some(&pod));
        let notes = keys::check(&root, &added)?;
        let keys: Keys = keys::read(&root)?;
        let mut config = Config {
            notes,
            ..keys::read(&root)?
        };
        let replaces_rdma_cni = keys.r#type.as_deref() == Some(RDMA_CNI);
        config.attach = match keys.attach {
            Some(attach) => attach,
            None if replaces_rdma_cni => Attach::RdmaOnly,
            None => {
                let remedy = format!("set it to {}", Attach::words());
                return Err(invalid("attach is missing", remedy));
            }
        };
        config.rdma = match keys.rdma {
            // As that plugin refuses a node whose RDMA devices cannot be a pod's own.
            None if replaces_rdma_cni => RdmaRequirement::Required,
            rdma => rdma.unwrap_or_default(),
        };
        // What the runtime says of this pod's allocation, before anything static. Multus writes
        // an allocation's ID into pciBusID as well, whether or not it is one.
        let id = runtime.text("deviceID")?.or(keys.device_id.as_deref());
        let id = id.map(|id| ("deviceID", id));
        let bus = keys.pci_bus_id.as_deref().map(|id| ("pciBusID", id));
        let allocation = id
            .or(bus)
            .map(|(key, text)| parsed(key, Some(text), allocation_of));
        config.allocation = allocation.transpose()?.flatten();
        let bus = bus.filter(|bus| id.is_some_and(|id| id.1 != bus.1));
        let bus = parsed("pciBusID", bus.map(|bus| bus.1), str::parse::<PciAddress>)?;
        // The order is that of the host-device plugin.
        config.device = (keys.device.clone().map(Target::Name))
            .or(parsed("hwaddr", keys.hwaddr.as_deref(), str::parse)?.map(Target::Mac))
            .or(parsed(
                "kernelpath",
                keys.kernelpath.as_deref(),
                kernel_path,
            )?)
            .or(bus.map(|address| Target::Hca(HcaId::Pci(address))))
            .or(keys.rdma_device.clone().map(Target::RdmaDevice));
        let guid = added_text(&runtime, "infinibandGUID", parse_guid)?
            .or(added_text(&pod, "guid", parse_guid)?)
            .or(parsed("guid", keys.guid.as_deref(), parse_guid)?);
        let is_configured = pod.text("mellanox.infiniband.app")? == Some("configured");
        if keys.ib_kubernetes_enabled && (guid.is_none() || !is_configured) {
            return Err(Error::advise(
                Code::TryAgain,
                "ibKubernetesEnabled: ib-kubernetes has not given the pod a GUID for this network",
                "its log names the pod; it serves networks of type ib-sriov alone (docs/migration.md)",
            ));
        }
        config.vf = vf::settings(&keys, guid)?;
        config.mac = match config.attach {
            // In a chain that of runtime and pod is for the plugin that makes the interface.
            Attach::RdmaOnly => None,
            _ => added_mac(request, &runtime, &pod)?,
        }
        .or(parsed("mac", keys.mac.as_deref(), unicast)?);
        config.pkey = match &keys.pkey {
            // ib-kubernetes makes the port of the VF a member.
            Some(value) if !keys.ib_kubernetes_enabled => Some(pkey(value, pkeys)?),
            _ => None,
        };
        config.source_routing = SourceRouting::read(keys.source_routing.as_ref())?;
        config.device_info = runtime.text("CNIDeviceInfoFile")?.map(str::to_owned);
        if keys.names.is_some() && config.devices == Devices::One {
            return Err(invalid(
                "names: has a meaning for several interfaces only",
                "set devices to all, or leave names out: the runtime names the interface",
            ));
        }
        let has_ipam = request.config.ipam_type()?.is_some();
        let idle = kinds::check(&keys, &config, bus.is_some(), has_ipam)?;
        config.notes.extend(idle);
        config.names = keys.names.unwrap_or_default();
        Ok(config)
    }

    /// `mode` as a mode of the kind of attachment; none when it is not given.
    ///
    /// # Errors
    /// Code 7: this kind does not have it.
    pub fn mode<T: DeserializeOwned>(&self) -> Result<Option<T>, Error> {
        let Some(mode) = self.mode.as_deref() else {
            return Ok(None);
        };
        let read = T::deserialize(mode.into_deserializer()).map(Some);
        read.map_err(|rule: json::Error| {
            let kind = self.attach.as_str();
            invalid(format!("mode: {mode:?} is not a mode of {kind}"), rule)
        })
    }
}

fn invalid(msg: impl fmt::Display, remedy: impl fmt::Display) -> Error {
    Error::advise(Code::InvalidConfig, msg, remedy)
}

fn allocation_of(text: &str) -> Result<Allocation, ParseError> {
    // A PCI address can be in capitals.
    let address = text.parse().map(|pci| UnitId::Exclusive(HcaId::Pci(pci)));
    Ok(Allocation {
        unit: address.or_else(|_| text.parse())?,
        text: text.to_owned(),
    })
}

/// What `parse` makes of the text of a key.
fn parsed<T, E: fmt::Display>(
    key: impl fmt::Display,
    text: Option<&str>,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Result<Option<T>, Error> {
    let value = text.map(parse).transpose();
    value.map_err(|why| Error::new(Code::InvalidConfig, format!("{key}: {why}")))
}

/// A key that runtime or pod adds.
fn added_text<T>(
    section: &Section<'_>,
    key: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, Error> {
    parsed(section.path_of(key), section.text(key)?, parse)
}

/// The runtime's address before the pod's.
fn added_mac(
    request: &Request,
    runtime: &Section<'_>,
    pod: &Section<'_>,
) -> Result<Option<MacAddress>, Error> {
    let added = added_text(runtime, "mac", unicast)?.or(added_text(pod, "mac", unicast)?);
    let args = request.env.args.get("MAC").filter(|_| added.is_none());
    let args = parsed("CNI_ARGS MAC", args, unicast).map_err(|e| Error {
        code: Code::InvalidEnvironment,
        ..e
    })?;
    Ok(added.or(args))
}

fn unicast(text: &str) -> Result<MacAddress, String> {
    let mac: MacAddress = text.parse().map_err(|e| format!("{e}"))?;
    match mac.bytes() {
        [first, ..] if mac.bytes().len() == 6 && first & 1 == 0 && !mac.is_zero() => Ok(mac),
        _ => Err(format!(
            "{text} is not the MAC address of one Ethernet interface"
        )),
    }
}

fn parse_guid(text: &str) -> Result<Guid, String> {
    port_guid(text).map(Guid).ok_or_else(|| {
        format!(
            "{text:?} is not the GUID of a port in a form such as 00:11:22:33:44:55:66:77, not all \
             zeros or ones"
        )
    })
}

fn kernel_path(path: &str) -> Result<Target, String> {
    let below = path.strip_prefix("/sys/devices/").unwrap_or_default();
    let mut parts = below.split('/');
    match parts.any(|part| matches!(part, "" | "." | "..")) {
        true => Err(format!("{path:?} is not a path below /sys/devices")),
        false => Ok(Target::KernelPath(path.to_owned())),
    }
}

/// A word in any case, as the SR-IOV plugin reads it.
fn word<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Option<T>, D::Error> {
    let word = Option::<String>::deserialize(from)?.map(|word| word.to_ascii_lowercase());
    let read = word.map(|word| T::deserialize(word.into_deserializer()));
    read.transpose()
}

fn not_zero<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    Ok(Option::deserialize(from)?.filter(|number| *number > 0))
}

fn up_to<'de, D: Deserializer<'de>, T: TryFrom<u32>, const MAX: u32>(
    from: D,
) -> Result<Option<T>, D::Error> {
    let Some(number) = Option::<u32>::deserialize(from)? else {
        return Ok(None);
    };
    let fits = T::try_from(number).ok().filter(|_| number <= MAX).map(Some);
    fits.ok_or_else(|| D::Error::custom(format_args!("must be from 0 to {MAX}")))
}

/// Zero means "not given", as in the reference plugins. Every link carries 68 bytes (RFC 791).
fn mtu<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    match Option::<u32>::deserialize(from)?.filter(|mtu| *mtu > 0) {
        Some(..68 | 65536..) => Err(D::Error::custom("must be 68 to 65535 bytes")),
        mtu => Ok(mtu),
    }
}

/// A partition key, as a number, as people write it (`0x8001`), or by its name in the policy.
fn pkey(value: &Value, names: &BTreeMap<String, u16>) -> Result<u16, Error> {
    let named = match value {
        Value::String(name) => names.get(name).copied(),
        _ => None,
    };
    named.or_else(|| partition_key(value)).ok_or_else(|| {
        let names = match names.is_empty() {
            true => "which names none".to_owned(),
            false => format!("which has {}", list(names.keys())),
        };
        let found = value.describe();
        invalid(
            format!("pkey: {found} is not a partition key"),
            format!(
                "expected a number such as \"0x8001\", which is full member of partition 1, or a \
                 name of pkeys in the node's policy, {names}"
            ),
        )
    })
}

#[cfg(test)]
mod tests {
    use attachment::part::{IpoibMode, IpvlanMode, MacvlanMode};
    use cni_wire::{Args, Command, Environment, NetworkConfig};
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_guid_comes_from_runtime_pod_or_network() {
        let (first, second, third) = (
            "0011223344556677",
            "00:11:22:33:44:55:66:78",
            "0011:2233:4455:6679",
        );
        let mut keys = json!({
            "runtimeConfig": {"infinibandGUID": first},
            "args": {"cni": {"guid": second}}, "guid": third
        });
        for (key, guid) in [
            ("runtimeConfig", 0x0011_2233_4455_6677),
            ("args", 0x0011_2233_4455_6678),
            ("guid", 0x0011_2233_4455_6679),
        ] {
            assert_eq!(read(keys.clone()).unwrap().vf.node_guid, Some(Guid(guid)));
            keys.as_object_mut().unwrap().remove(key);
        }
        assert_eq!(read(keys).unwrap().vf.node_guid, None);
    }

    #[test]
    fn a_network_of_ib_kubernetes_waits_for_its_guid() {
        let network = |args: Value| json!({"attach": "move", "pkey": "0x8001", "ibKubernetesEnabled": true, "args": {"cni": args}});
        let guid = "02:00:00:00:00:00:00:01";
        for args in [
            json!({}),
            json!({"guid": guid}),
            json!({"mellanox.infiniband.app": "configured"}),
        ] {
            assert_eq!(read(network(args)).unwrap_err().code, Code::TryAgain);
        }
        let config = read(network(
            json!({"guid": guid, "mellanox.infiniband.app": "configured"}),
        ));
        let config = config.unwrap();
        assert_eq!(
            (config.vf.node_guid, config.pkey),
            (Some(Guid(0x0200_0000_0000_0001)), None)
        );
    }

    fn read_with(keys: Value, args: &str) -> Result<Config, Error> {
        let mut object = json!({"cniVersion": "1.0.0", "name": "rail0", "type": "rdma-netdev", "attach": "move"});
        object
            .as_object_mut()
            .unwrap()
            .extend(keys.as_object().unwrap().clone());
        let storage = BTreeMap::from([("storage".to_owned(), 0x8005)]);
        Config::read(
            &Request {
                env: Environment {
                    command: Command::Add,
                    attachment: None,
                    netns: None,
                    args: Args::parse(args).unwrap(),
                    path: Vec::new(),
                    netns_override: false,
                },
                config: NetworkConfig::parse(object.to_string().as_bytes()).unwrap(),
            },
            &storage,
        )
    }

    pub(super) fn read(keys: Value) -> Result<Config, Error> {
        read_with(keys, "")
    }

    #[test]
    fn the_target_is_chosen_in_the_order_of_host_device() {
        let all = json!({"device": "eth1", "hwaddr": "02:00:00:00:00:01",
            "kernelpath": "/sys/devices/pci0000:00", "pciBusID": "0000:3b:00.0",
            "runtimeConfig": {"deviceID": "0000:5e:00.1"}});
        let without = |keys: &[&str]| {
            let mut value = all.clone();
            for key in keys {
                value.as_object_mut().unwrap().remove(*key);
            }
            read(value).unwrap()
        };
        assert_eq!(without(&[]).device, Some(Target::Name("eth1".into())));
        assert!(matches!(without(&["device"]).device, Some(Target::Mac(_))));
        assert!(matches!(
            without(&["device", "hwaddr"]).device,
            Some(Target::KernelPath(_))
        ));
        let bus = without(&["device", "hwaddr", "kernelpath"]);
        assert_eq!(
            bus.device,
            Some(Target::Hca("0000:3b:00.0".parse().unwrap()))
        );
        assert_eq!(bus.allocation.unwrap().text, "0000:5e:00.1");
        let passed_over = read(all.clone()).unwrap().notes;
        assert_eq!(passed_over[0], "hwaddr has no effect beside device");
        assert_eq!(passed_over.len(), 2);
        let none = read(json!({})).unwrap();
        assert_eq!((none.device, none.allocation), (None, None));
    }

    #[test]
    fn what_multus_writes_twice_is_one_allocation() {
        for id in [
            "0000:3b:00.0_3e71787e_17",
            "0000:3b:00.0",
            "mlx5_core.sf.4",
            "pool_3e71787e_1",
        ] {
            let config = read(json!({"deviceID": id, "pciBusID": id})).unwrap();
            assert_eq!(config.device, None, "{id}");
            assert_eq!(config.allocation.unwrap().text, id);
        }
        for key in ["deviceID", "pciBusID"] {
            let error = read(json!({ key: "zz" })).unwrap_err();
            assert!(error.msg.starts_with(key), "{error}");
        }
        let shared = read(json!({"deviceID": "0000:3b:00.0_3e71787e_17"})).unwrap();
        assert!(matches!(
            shared.allocation.unwrap().unit,
            UnitId::Shared { share: 17, .. }
        ));
        let capitals = read(json!({"deviceID": "0000:3B:00.0"})).unwrap();
        assert!(matches!(
            capitals.allocation.unwrap().unit,
            UnitId::Exclusive(HcaId::Pci(_))
        ));
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        for (keys, named) in [
            (json!({"attach": "bridge"}), "attach"),
            (
                json!({"attach": null, "master": "eth1"}),
                "attach is missing",
            ),
            (
                json!({"attach": null, "deviceID": "0000:3b:00.0"}),
                "attach is missing",
            ),
            (json!({"mtu": -1}), "mtu"),
            (json!({"mtu": 67}), "mtu"),
            (json!({"mtu": 70000}), "mtu"),
            (json!({"mtu": "1500"}), "mtu"),
            (json!({"mac": "01:00:00:00:00:01"}), "mac"),
            (json!({"mac": "00:00:00:00:00:00"}), "mac"),
            (json!({"mac": "02:00:00:00:00"}), "mac"),
            (json!({"hwaddr": "x"}), "hwaddr"),
            (json!({"kernelpath": "/etc"}), "kernelpath"),
            (
                json!({"kernelpath": "/sys/devices/../../etc"}),
                "kernelpath",
            ),
            (json!({"kernelpath": "/sys/devices/"}), "kernelpath"),
            (json!({"deviceID": "a b"}), "deviceID"),
            (json!({"attach": "move", "master": "eth1"}), "master"),
            (json!({"attach": "move", "mode": "bridge"}), "mode"),
            (json!({"attach": "macvlan", "device": "eth1"}), "device"),
            (json!({"rdma": "yes"}), "rdma"),
            (json!({"attach": "rdma-only", "rdma": "off"}), "rdma"),
            (json!({"attach": "rdma-only", "master": "eth1"}), "master"),
            (json!({"linkInContainer": true}), "linkInContainer"),
            (json!({"pkey": "0x8000"}), "pkey"),
            (json!({"pkey": 65536}), "pkey"),
            (json!({"pkey": "yes"}), "pkey"),
            (json!({"bcqueuelen": -1}), "bcqueuelen"),
            (json!({"rail": 256}), "rail"),
            (json!({"rail": "0"}), "rail"),
            (json!({"attach": "rdma-only", "rail": 0}), "rail"),
            (json!({"devices": "all", "rail": 0}), "rail"),
            (
                json!({"runtimeConfig": {"infinibandGUID": "aa"}}),
                "infinibandGUID",
            ),
            (
                json!({"infinibandGUID": "0011223344556677"}),
                "infinibandGUID",
            ),
            (json!({"guid": "00:00:00:00:00:00:00:00"}), "guid"),
            (json!({"guid": "ff:ff:ff:ff:ff:ff:ff:ff"}), "guid"),
            (json!({"guid": "00:11:22:33:44:55:66:7"}), "guid"),
            (json!({"guid": "001:1:22:33:44:55:66:77"}), "guid"),
            (
                json!({"attach": "ipoib", "guid": "0011223344556677"}),
                "guid",
            ),
            (
                json!({"devices": "all", "guid": "0011223344556677"}),
                "guid",
            ),
            (json!({"runtimeConfig": {"mac": "x"}}), "runtimeConfig.mac"),
        ] {
            let error = read(keys.clone()).unwrap_err();
            assert!(error.msg.contains(named), "{keys}: {error}");
            assert!(
                matches!(error.code, Code::InvalidConfig | Code::UnsupportedField),
                "{keys}"
            );
        }
        assert_eq!(
            read_with(json!({}), "MAC=x").unwrap_err().code,
            Code::InvalidEnvironment
        );
    }

    #[test]
    fn unknown_arguments_need_leave() {
        let kubernetes = "K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_INFRA_CONTAINER_ID=c;\
                          K8S_POD_UID=d;MAC=02:00:00:00:00:01;IP=10.0.0.1";
        assert!(read_with(json!({}), kubernetes).is_ok());
        let error = read_with(json!({}), "COLOUR=blue").unwrap_err();
        assert_eq!(error.code, Code::InvalidEnvironment);
        assert!(error.msg.contains("COLOUR"), "{error}");
        for leave in ["1", "true", "True"] {
            assert!(read_with(json!({}), &format!("IgnoreUnknown={leave};COLOUR=blue")).is_ok());
        }
        assert!(read_with(json!({}), "IgnoreUnknown=0;COLOUR=blue").is_err());
    }

    #[test]
    fn a_netdev_to_move_and_a_master_exclude_each_other() {
        let devices = [
            ("device", json!("eth1")),
            ("hwaddr", json!("02:00:00:00:00:01")),
            ("kernelpath", json!("/sys/devices/pci0000:00")),
            ("rdmaDevice", json!("mlx5_0")),
        ];
        for (device, value) in devices {
            for attach in [json!("move"), json!("macvlan")] {
                let keys = json!({device: value, "master": "eth2", "attach": attach});
                let error = read(keys).unwrap_err();
                assert_eq!(error.code, Code::InvalidConfig, "{error}");
                let text = error.to_string();
                let named = text.contains(device) && text.contains("master");
                assert!(named, "{device}: {text}");
            }
        }
        // What Multus writes beside a master.
        let id = "0000:3b:00.0";
        let multus = json!({"attach": "macvlan", "master": "eth1", "deviceID": id, "pciBusID": id});
        assert_eq!(read(multus).unwrap().master.as_deref(), Some("eth1"));
    }

    #[test]
    fn in_the_place_of_the_rdma_plugin_it_does_what_that_does() {
        let keys = json!({"type": "rdma", "attach": null, "deviceID": "0000:3b:00.2"});
        let replacing = read(keys).unwrap();
        assert_eq!(replacing.attach, Attach::RdmaOnly);
        assert_eq!(replacing.rdma, RdmaRequirement::Required);
        let given = read(json!({"type": "rdma", "attach": null, "rdma": "auto"})).unwrap();
        assert_eq!(given.rdma, RdmaRequirement::Auto);
        assert_eq!(read(json!({})).unwrap().rdma, RdmaRequirement::Auto);
    }

    #[test]
    fn the_most_specific_mac_wins() {
        let keys = json!({"mac": "02:00:00:00:00:01", "args": {"cni": {"mac": "02:00:00:00:00:03"}},
                          "runtimeConfig": {"mac": "02:00:00:00:00:04"}});
        let mac = |keys: Value, args: &str| read_with(keys, args).unwrap().mac.unwrap().to_string();
        assert_eq!(mac(keys, ""), "02:00:00:00:00:04");
        let keys = json!({"mac": "02:00:00:00:00:01"});
        assert_eq!(
            mac(keys.clone(), "MAC=02:00:00:00:00:02"),
            "02:00:00:00:00:02"
        );
        assert_eq!(mac(keys, ""), "02:00:00:00:00:01");
    }

    #[test]
    fn zero_means_not_given() {
        let keys = json!({"attach": "macvlan", "mtu": 0, "bcqueuelen": 0, "port": 0});
        let config = read(keys).unwrap();
        assert_eq!(
            (config.mtu, config.broadcast_queue, config.port),
            (None, None, None)
        );
        assert_eq!(read(json!({"mtu": 9000})).unwrap().mtu, Some(9000));
    }

    #[test]
    fn modes_belong_to_their_kind() {
        let mode = |mode: &str| Config {
            mode: Some(mode.into()),
            ..Config::default()
        };
        for text in ["bridge", "private", "vepa", "passthru"] {
            assert!(mode(text).mode::<MacvlanMode>().is_ok(), "{text}");
            assert!(mode(text).mode::<IpvlanMode>().is_err(), "{text}");
        }
        for text in ["source", "foo", "l2", "Bridge"] {
            assert!(mode(text).mode::<MacvlanMode>().is_err(), "{text}");
        }
        for text in ["l2", "l3", "l3s"] {
            assert!(mode(text).mode::<IpvlanMode>().is_ok(), "{text}");
        }
        let connected = mode("connected").mode();
        assert_eq!(connected, Ok(Some(IpoibMode::Connected)));
        let error = mode("bridge").mode::<IpoibMode>().unwrap_err();
        assert_eq!(error.details, "must be \"datagram\" or \"connected\"");
    }

    #[test]
    fn partition_keys_are_numbers_hexadecimal_texts_or_names_of_the_policy() {
        let partition = |pkey: Value| read(json!({"attach": "ipoib", "pkey": pkey}));
        for value in [json!("0x8001"), json!("8001"), json!(0x8001)] {
            assert_eq!(partition(value).unwrap().pkey, Some(0x8001));
        }
        assert_eq!(partition(json!("storage")).unwrap().pkey, Some(0x8005));
        let error = partition(json!("storag")).unwrap_err();
        assert!(error.details.contains("which has storage"), "{error}");
    }
}
