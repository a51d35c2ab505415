//! What a lease records: one small JSON file that a person can read.
//!
//! A record has all that an order took at once: the holder once, and `leases`, a list of
//! addresses.
//!
//! Pure. Reading checks everything that is later used to build a path, and bounds every text.

use cni_wire::{ContainerId, IfName};
use ipnetwork::IpNetwork;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use node::identity::is_name;

/// The largest record that is read, in bytes: 64 leases of a network with the longest name
/// fit.
pub const MAX_BYTES: u64 = 64 * 1024;
/// What one file records: the leases that one attachment took at once, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    leases: Vec<Lease>,
    holder: Holder,
    /// How old the boot was when they were taken.
    pub since_boot: Duration,
}

/// One address, whose it is, and since when.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    pub address: IpAddr,
    /// Prefix length that goes with it into the result.
    pub prefix: u8,
    /// The pool: the range's network.
    pub range: IpNetwork,
    /// Name of the store in the policy.
    pub store: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_name: Option<String>,
    /// Whether the address is leased once in all ranges of the network name.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub overlapping: bool,
    /// Whether this very address was asked for.
    #[serde(default, skip_serializing_if = "is_false")]
    pub requested: bool,
    /// Which address of its record it is, from 0.
    pub part: usize,
    #[serde(flatten)]
    pub holder: Holder,
    /// When, RFC 3339 in UTC.
    pub created: jiff::Timestamp,
}

/// An attachment, and where it lives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Holder {
    /// Name of the CNI network.
    pub network: String,
    /// The pod, where the runtime named it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<Pod>,
    pub container: String,
    pub interface: String,
    pub node: String,
    /// Path of the network namespace, as the runtime gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<String>,
    /// The namespace's inode number, which distinguishes it from a later one at the same path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns_inode: Option<u64>,
    /// The device the attachment is made with, if one was allocated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    /// UID, where the runtime gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
}

/// Why a record cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Empty: what a crash of the machine leaves of a file that was not synced.
    #[error("the record is empty")]
    Empty,
    /// A list without a lease.
    #[error("the record has no lease")]
    None,
    /// No JSON, or keys missing.
    #[error("the record cannot be decoded: {0}")]
    Decode(String),
    /// A field breaks its rule.
    #[error("{field}: {value:?} breaks the rule for it")]
    Field { field: &'static str, value: String },
}

fn yes() -> bool {
    true
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_true(value: &bool) -> bool {
    *value
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_false(value: &bool) -> bool {
    !*value
}

impl fmt::Display for Pod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// As in messages: `pod a/b (net1, container 0123456789ab) on node n`.
impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(pod) = &self.pod {
            write!(f, "pod {pod} ")?;
        }
        let short = self.container.get(..12).unwrap_or(&self.container);
        let (interface, node) = (&self.interface, &self.node);
        write!(f, "({interface}, container {short}) on node {node}")
    }
}

/// A record as it is written.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OrderText {
    #[serde(flatten)]
    holder: Holder,
    created: jiff::Timestamp,
    since_boot_ms: u64,
    leases: Vec<AddressText>,
}

/// What a record says of one address: the fields of [`Lease`] that are its own.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct AddressText {
    address: IpAddr,
    prefix: u8,
    range: IpNetwork,
    store: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    network_name: Option<String>,
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    overlapping: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    requested: bool,
}

impl AddressText {
    fn of(lease: &Lease) -> Self {
        Self {
            address: lease.address,
            prefix: lease.prefix,
            range: lease.range,
            store: lease.store.clone(),
            network_name: lease.network_name.clone(),
            overlapping: lease.overlapping,
            requested: lease.requested,
        }
    }

    fn lease(self, part: usize, holder: &Holder, created: jiff::Timestamp) -> Lease {
        Lease {
            address: self.address,
            prefix: self.prefix,
            range: self.range,
            store: self.store,
            network_name: self.network_name,
            overlapping: self.overlapping,
            requested: self.requested,
            part,
            holder: holder.clone(),
            created,
        }
    }
}

impl Record {
    /// A record of leases of one holder, taken when the boot was so old; `None` without any.
    #[must_use]
    pub fn of(leases: Vec<Lease>, since_boot: Duration) -> Option<Self> {
        Some(Self {
            holder: leases.first()?.holder.clone(),
            leases,
            since_boot,
        })
    }

    #[must_use]
    pub fn leases(&self) -> &[Lease] {
        &self.leases
    }

    /// Whose they are.
    #[must_use]
    pub fn holder(&self) -> &Holder {
        &self.holder
    }

    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let text = self.leases.first().map(|first| OrderText {
            holder: self.holder.clone(),
            created: first.created,
            since_boot_ms: u64::try_from(self.since_boot.as_millis()).unwrap_or(u64::MAX),
            leases: self.leases.iter().map(AddressText::of).collect(),
        });
        // Neither maps with other keys than text nor failing serializers in here.
        let mut bytes = serde_json::to_vec_pretty(&text).unwrap_or_default();
        bytes.push(b'\n');
        bytes
    }

    /// Reads and checks a file's content.
    ///
    /// # Errors
    /// [`RecordError`]: whatever a truncated or foreign file may hold.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Err(RecordError::Empty);
        }
        let text: OrderText =
            serde_json::from_slice(bytes).map_err(|e| RecordError::Decode(e.to_string()))?;
        let (holder, created) = (text.holder, text.created);
        let leases = text.leases.into_iter().enumerate();
        let leases: Vec<Lease> = leases
            .map(|(part, lease)| lease.lease(part, &holder, created))
            .collect();
        leases.iter().try_for_each(Lease::check)?;
        Self::of(leases, Duration::from_millis(text.since_boot_ms)).ok_or(RecordError::None)
    }
}

impl Lease {
    fn check(&self) -> Result<(), RecordError> {
        let wrong = |field, value: &dyn ToString| {
            let value = value.to_string().chars().take(80).collect();
            Err(RecordError::Field { field, value })
        };
        let holder = &self.holder;
        if !self.range.contains(self.address) {
            return wrong("address", &self.address);
        }
        if self.prefix > if self.address.is_ipv4() { 32 } else { 128 } {
            return wrong("prefix", &self.prefix);
        }
        if !is_name(&self.store) {
            return wrong("store", &self.store);
        }
        if let Some(name) = self.network_name.as_deref().filter(|name| !is_name(name)) {
            return wrong("networkName", &name);
        }
        if ContainerId::parse(&holder.container).is_err() || holder.container.len() > 200 {
            return wrong("container", &holder.container);
        }
        if IfName::parse(&holder.interface).is_err() {
            return wrong("interface", &holder.interface);
        }
        if !is_name(&holder.node) {
            return wrong("node", &holder.node);
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(crate) fn lease(address: &str, range: &str) -> Lease {
        let range: IpNetwork = range.parse().unwrap();
        Lease {
            address: address.parse().unwrap(),
            prefix: range.prefix(),
            range,
            store: "default".into(),
            network_name: None,
            overlapping: true,
            requested: false,
            part: 0,
            holder: Holder {
                network: "rail0".into(),
                pod: Some(Pod {
                    namespace: "ml".into(),
                    name: "train-0".into(),
                    uid: None,
                }),
                container: "0123456789abcdef".into(),
                interface: "net1".into(),
                node: "gpu-7".into(),
                netns: Some("/run/netns/x".into()),
                netns_inode: Some(4_026_532_000),
                device: Some("0000:3b:00.1".into()),
            },
            created: jiff::Timestamp::UNIX_EPOCH,
        }
    }

    fn of(leases: Vec<Lease>) -> Record {
        Record::of(leases, Duration::from_secs(7)).unwrap()
    }

    fn one(address: &str, range: &str) -> Record {
        of(vec![lease(address, range)])
    }

    /// Eight addresses, as one order has them.
    fn order() -> Record {
        let part = |part: usize| Lease {
            part,
            network_name: (part % 2 == 1).then(|| "blue".into()),
            overlapping: part != 3,
            ..lease(&format!("10.0.{part}.5"), &format!("10.0.{part}.0/24"))
        };
        of((0..8).map(part).collect())
    }

    #[test]
    fn a_record_reads_back() {
        for record in [
            one("10.0.0.5", "10.0.0.0/24"),
            one("fd00::5", "fd00::/64"),
            order(),
        ] {
            assert_eq!(Record::decode(&record.encode()), Ok(record));
        }
    }

    #[test]
    fn a_record_is_for_people() {
        let text = one("10.0.0.5", "10.0.0.0/24").encode();
        let text = String::from_utf8(text).unwrap();
        for line in [
            "\"address\": \"10.0.0.5\"",
            "\"pod\": {",
            "\"created\": \"1970-01-01T00:00:00Z\"",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn the_largest_order_fits_into_a_record() {
        let long = "n".repeat(253);
        let mut widest = lease(
            "2001:db8:ffff:ffff:ffff:ffff:ffff:ff05",
            "2001:db8:ffff:ffff:ffff:ffff:ffff:ff00/120",
        );
        widest.network_name = Some(long.clone());
        widest.overlapping = false;
        widest.requested = true;
        let holder = &mut widest.holder;
        (holder.network, holder.node) = (long.clone(), long.clone());
        holder.container = "c".repeat(200);
        holder.netns = Some("/".repeat(4096));
        holder.device = Some("d".repeat(256));
        holder.pod = Some(Pod {
            namespace: long.clone(),
            name: long.clone(),
            uid: Some(long),
        });
        let text = of(vec![widest; 64]).encode();
        assert!(text.len() as u64 <= MAX_BYTES, "{} bytes", text.len());
        assert_eq!(Record::decode(&text).unwrap().leases().len(), 64);
    }

    #[test]
    fn what_would_lead_elsewhere_is_refused() {
        let order: serde_json::Value = serde_json::from_slice(&order().encode()).unwrap();
        for (key, value) in [
            ("address", "10.0.9.5"),
            ("networkName", "../.."),
            ("store", "a/b"),
            ("container", "../../etc/passwd"),
            ("container", ""),
            ("interface", "a/b"),
            ("node", ""),
            ("node", ".."),
            ("node", "a/b"),
        ] {
            let mut bad = order.clone();
            match order.get(key) {
                Some(_) => bad[key] = value.into(),
                None => bad["leases"][7][key] = value.into(),
            }
            let refused = Record::decode(bad.to_string().as_bytes());
            let found = match &refused {
                Err(RecordError::Field { value, .. }) => value,
                other => panic!("{key} {value}: {other:?}"),
            };
            assert_eq!(found, value, "{key}");
        }
        let mut bad = order.clone();
        bad["leases"][7]["prefix"] = 33.into();
        assert!(Record::decode(bad.to_string().as_bytes()).is_err());
        assert_eq!(Record::decode(b" \n"), Err(RecordError::Empty));
        for text in [&b"{}"[..], b"[]", b"null", b"{\"leases\": 7}"] {
            assert!(matches!(Record::decode(text), Err(RecordError::Decode(_))));
        }
        let mut none = order;
        none["leases"] = serde_json::json!([]);
        let none = Record::decode(none.to_string().as_bytes());
        assert_eq!(none, Err(RecordError::None));
    }

    #[test]
    fn a_truncated_record_is_refused_wherever_it_ends() {
        let whole = order().encode();
        for length in 0..whole.len() - 2 {
            assert!(Record::decode(&whole[..length]).is_err(), "{length}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Record::decode(&bytes);
        }
    }
}
