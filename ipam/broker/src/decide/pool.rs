//! What a pool of whereabouts says, which address of it to try, and how it is changed.
//!
//! A change tests its own entries only, not the pool's `resourceVersion`: what others change meanwhile
//! does not matter as long as these entries are as they were. whereabouts tests the `resourceVersion`,
//! so it tries again after any change of ours.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipam::whereabouts::{address, offset, pool_name};
use ipnetwork::IpNetwork;
use node_wire::AttachmentId;
use serde_json::{Value, json};

use crate::api::whereabouts::{Allocation, Operation, PoolObject};

/// The leases of a range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    range: IpNetwork,
    /// By the distance to the network address.
    entries: BTreeMap<u64, Entry>,
}

/// One lease of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The address.
    pub address: IpAddr,
    /// The distance, as it is written.
    pub key: String,
    /// Whose.
    pub lease: Allocation,
}

/// One change of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Edit {
    /// An address that is free is leased.
    Add {
        /// The distance to the network address.
        offset: u64,
        /// To whom.
        lease: Allocation,
    },
    /// An address is another container's of the same pod from now on.
    Renew {
        /// The distance, as it is written.
        key: String,
        /// The container that had it.
        was: String,
        /// The container that has it.
        id: String,
    },
    /// An address is freed.
    Remove {
        /// The distance, as it is written.
        key: String,
        /// The container that had it.
        id: String,
    },
}

impl Pool {
    /// Reads an object as the pool of a range. Entries whose key is no number are passed over, as by
    /// whereabouts.
    ///
    /// # Errors
    /// The object is of another range, by which its distances count.
    pub fn read(object: PoolObject, range: IpNetwork) -> Result<Self, String> {
        if object.spec.range.parse() != Ok(range) {
            return Err(format!(
                "IPPool {} has the range {:?}, expected {range}: its entries count from another address; \
                 end its pods and delete it",
                object.metadata.name, object.spec.range
            ));
        }
        let entries = object.spec.allocations.into_iter();
        let entries = entries.filter_map(|(key, lease)| {
            let offset = key.parse().ok()?;
            let address = address(range, offset)?;
            let entry = Entry {
                address,
                key,
                lease,
            };
            Some((offset, entry))
        });
        Ok(Self {
            range,
            entries: entries.collect(),
        })
    }

    /// One without leases.
    #[must_use]
    pub fn empty(range: IpNetwork) -> Self {
        Self {
            range,
            entries: BTreeMap::new(),
        }
    }

    /// The lease of a pod's interface: by these whereabouts gives a repeated ADD its address again.
    #[must_use]
    pub fn of_pod(&self, pod: &str, interface: &str) -> Option<&Entry> {
        self.entries
            .values()
            .find(|entry| entry.lease.podref == pod && entry.lease.ifname == interface)
    }

    /// The leases of an attachment: by these whereabouts frees.
    #[must_use]
    pub fn of_attachment(&self, id: &AttachmentId) -> Vec<&Entry> {
        self.entries
            .values()
            .filter(|entry| entry.lease.id == id.container && entry.lease.ifname == id.interface)
            .collect()
    }

    /// The lease of an address.
    #[must_use]
    pub fn at(&self, address: IpAddr) -> Option<&Allocation> {
        let offset = offset(self.range, address).ok()?;
        self.entries.get(&offset).map(|entry| &entry.lease)
    }

    /// The lowest address of ascending spans that is not leased here and not taken elsewhere.
    #[must_use]
    pub fn lowest_free(
        &self,
        spans: &[(IpAddr, IpAddr)],
        is_taken: impl Fn(IpAddr) -> bool,
    ) -> Option<IpAddr> {
        spans.iter().find_map(|(first, last)| {
            let first = offset(self.range, *first).ok()?;
            let last = offset(self.range, *last).unwrap_or(ipam::whereabouts::MAX_OFFSET);
            let mut held = self
                .entries
                .range(first..)
                .map(|(held, _)| *held)
                .peekable();
            let free = (first..=last).filter(|next| held.next_if_eq(next).is_none());
            free.filter_map(|free| address(self.range, free))
                .find(|free| !is_taken(*free))
        })
    }
}

/// The patch of some changes, each with its test.
#[must_use]
pub fn operations(edits: &[Edit]) -> Vec<Operation> {
    let path = |key: &dyn std::fmt::Display| format!("/spec/allocations/{key}");
    let is = |path: String, value: Value| Operation::Test { path, value };
    let container = |key: &str| format!("{}/id", path(&key));
    edits
        .iter()
        .flat_map(|edit| match edit {
            Edit::Add { offset, lease } => [
                // Of a path that is not there the API server says that it is null.
                is(path(offset), Value::Null),
                Operation::Add {
                    path: path(offset),
                    value: json!(lease),
                },
            ],
            Edit::Renew { key, was, id } => [
                is(container(key), json!(was)),
                Operation::Replace {
                    path: container(key),
                    value: json!(id),
                },
            ],
            Edit::Remove { key, id } => [
                is(container(key), json!(id)),
                Operation::Remove { path: path(key) },
            ],
        })
        .collect()
}

/// Of which range and network name a pool is, by its object; `None` if its name is not that of its
/// range.
#[must_use]
pub fn key_of(object: &PoolObject) -> Option<(IpNetwork, Option<String>)> {
    let range: IpNetwork = object.spec.range.parse().ok()?;
    let name = &object.metadata.name;
    if *name == pool_name(range, None) {
        return Some((range, None));
    }
    let network_name = ipam::whereabouts::network_name_of_pool(name, range)?;
    Some((range, Some(network_name.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> IpNetwork {
        text.parse().unwrap()
    }

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn lease(id: &str, pod: &str, interface: &str) -> Allocation {
        Allocation {
            id: id.into(),
            podref: pod.into(),
            ifname: interface.into(),
        }
    }

    fn pool(range: &str, entries: &[(&str, &str, &str, &str)]) -> Pool {
        let mut object = PoolObject::new("p", range);
        for (key, id, pod, interface) in entries {
            let allocations = &mut object.spec.allocations;
            allocations.insert((*key).into(), lease(id, pod, interface));
        }
        Pool::read(object, net(range)).unwrap()
    }

    #[test]
    fn the_lowest_free_address_is_tried_first() {
        let pool = pool(
            "10.0.0.0/29",
            &[("1", "a", "ml/a", "net1"), ("3", "b", "ml/b", "net1")],
        );
        let all = [(ip("10.0.0.1"), ip("10.0.0.6"))];
        let free = |spans: &[(IpAddr, IpAddr)], taken: &[&str]| {
            let taken: Vec<IpAddr> = taken.iter().map(|text| ip(text)).collect();
            pool.lowest_free(spans, |address| taken.contains(&address))
                .map(|address| address.to_string())
        };
        assert_eq!(free(&all, &[]).as_deref(), Some("10.0.0.2"));
        assert_eq!(free(&all, &["10.0.0.2"]).as_deref(), Some("10.0.0.4"));
        let parts = [
            (ip("10.0.0.1"), ip("10.0.0.1")),
            (ip("10.0.0.3"), ip("10.0.0.5")),
        ];
        assert_eq!(free(&parts, &[]).as_deref(), Some("10.0.0.4"));
        assert_eq!(free(&parts, &["10.0.0.4", "10.0.0.5"]), None);
        assert_eq!(free(&[], &[]), None);
    }

    #[test]
    fn addresses_that_whereabouts_does_not_read_again_are_not_tried() {
        let pool = pool("fd00::/60", &[]);
        let far = (ip("fd00:0:0:1::"), ip("fd00:0:0:1::5"));
        assert_eq!(pool.lowest_free(&[far], |_| false), None);
        let across = (ip("fd00::7fff:ffff:ffff:fffe"), ip("fd00::8000:0:0:5"));
        let free = pool.lowest_free(&[across], |address| address == across.0);
        assert_eq!(free, Some(ip("fd00::7fff:ffff:ffff:ffff")));
    }

    #[test]
    fn leases_are_found_as_whereabouts_finds_them() {
        let pool = pool(
            "10.0.0.0/24",
            &[
                ("5", "c1", "ml/a", "net1"),
                ("6", "c1", "ml/a", "net2"),
                ("7", "c2", "ml/b", ""),
                ("x", "c3", "ml/c", "net1"),
                ("256", "c4", "ml/d", "net1"),
            ],
        );
        let found = pool.of_pod("ml/a", "net2").map(|entry| entry.address);
        assert_eq!(found, Some(ip("10.0.0.6")));
        for (pod, interface) in [("ml/b", "net1"), ("ml/c", "net1"), ("ml/d", "net1")] {
            assert_eq!(pool.of_pod(pod, interface), None, "{pod}");
        }
        let id = |container: &str, interface: &str| AttachmentId {
            container: container.into(),
            interface: interface.into(),
        };
        let of: Vec<&str> = pool
            .of_attachment(&id("c1", "net1"))
            .iter()
            .map(|entry| entry.key.as_str())
            .collect();
        assert_eq!(of, ["5"]);
        assert!(pool.of_attachment(&id("c2", "net1")).is_empty());
        assert_eq!(pool.at(ip("10.0.0.7")), Some(&lease("c2", "ml/b", "")));
        assert_eq!(pool.at(ip("10.0.0.8")), None);
    }

    #[test]
    fn a_pool_of_another_range_is_refused() {
        for range in ["10.0.0.5/24", "10.0.0.0/25", "junk"] {
            let why = Pool::read(PoolObject::new("p", range), net("10.0.0.0/24")).unwrap_err();
            assert!(why.contains(range) && why.contains("10.0.0.0/24"), "{why}");
        }
    }

    #[test]
    fn a_change_tests_its_own_entries() {
        let edits = [
            Edit::Add {
                offset: 5,
                lease: lease("c", "ml/a", "net1"),
            },
            Edit::Renew {
                key: "6".into(),
                was: "old".into(),
                id: "new".into(),
            },
            Edit::Remove {
                key: "07".into(),
                id: "c".into(),
            },
        ];
        assert_eq!(
            json!(operations(&edits)),
            json!([
                {"op": "test", "path": "/spec/allocations/5", "value": null},
                {"op": "add", "path": "/spec/allocations/5",
                 "value": {"id": "c", "podref": "ml/a", "ifname": "net1"}},
                {"op": "test", "path": "/spec/allocations/6/id", "value": "old"},
                {"op": "replace", "path": "/spec/allocations/6/id", "value": "new"},
                {"op": "test", "path": "/spec/allocations/07/id", "value": "c"},
                {"op": "remove", "path": "/spec/allocations/07"},
            ])
        );
    }

    #[test]
    fn a_pool_says_which_network_name_it_is_of() {
        for (name, key) in [
            ("10.0.0.0-24", Some((net("10.0.0.0/24"), None))),
            (
                "blue-10.0.0.0-24",
                Some((net("10.0.0.0/24"), Some("blue".to_owned()))),
            ),
            ("other", None),
        ] {
            assert_eq!(key_of(&PoolObject::new(name, "10.0.0.0/24")), key, "{name}");
        }
    }
}
