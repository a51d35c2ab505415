//! The part of a netdev's state that ethtool(8) sets: features, channels, rings, coalescing, pause
//! frames, private flags, link modes, FEC, receive side scaling.
//!
//! A change of namespaces leaves all of it as it is, and a pod may change it. A NIC with rules by which
//! it steers what it receives is not moved, so that those that it returns with are the pod's. What a driver does not
//! have is not in the snapshot; what it refuses to take back is a warning.

use std::collections::BTreeMap;

use netlink::{
    Name,
    ethtool::{Ethtool, GROUPS, Group, Settings},
    ioctl,
    link::Link,
};
use serde::{Deserialize, Serialize};

use super::snapshot::{hexadecimal, of_hexadecimal};

/// What ethtool sets of a netdev.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Tuning {
    /// Features that can be changed, and whether each is wanted.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub features: BTreeMap<String, bool>,
    /// The settings of each of [`GROUPS`]: attribute number and value, in hexadecimal.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub groups: BTreeMap<String, BTreeMap<u16, String>>,
}

impl Tuning {
    /// Reads the state of a netdev of the namespace the thread is in; none on a kernel without
    /// ethtool over netlink (before 5.6).
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn take(link: &Link) -> netlink::Result<Option<Tuning>> {
        Ethtool::open()?
            .map(|mut ethtool| Tuning::read(&mut ethtool, link))
            .transpose()
    }

    fn read(ethtool: &mut Ethtool, link: &Link) -> netlink::Result<Tuning> {
        let mut groups = BTreeMap::new();
        for group in &GROUPS {
            if let Some(settings) = ethtool.settings(link.index, group)? {
                let settings = settings
                    .iter()
                    .map(|(kind, value)| (*kind, hexadecimal(value)));
                groups.insert(group.name.to_owned(), settings.collect());
            }
        }
        Ok(Tuning {
            features: ethtool.features(link.index)?,
            groups,
        })
    }

    /// Restores what differs. `name` is what the netdev is called in warnings. Returns what could
    /// not be restored, as text.
    ///
    /// # Errors
    /// The netdev cannot be read.
    pub fn restore(&self, link: &Link, name: &Name) -> netlink::Result<Vec<String>> {
        let Some(mut ethtool) = Ethtool::open()? else {
            return Ok(Vec::new());
        };
        let now = Tuning::read(&mut ethtool, link)?;
        let mut warnings = Vec::new();
        let mut attempt = |done: netlink::Result<()>| {
            warnings.extend(done.err().map(|e| e.to_string()));
        };
        for location in ioctl::flow_rules(&link.name)? {
            attempt(ioctl::delete_flow_rule(&link.name, location));
        }
        if now == *self {
            return Ok(warnings);
        }
        for group in GROUPS.iter().filter(|group| group.can_be_set()) {
            let wrong = self.wrong(group, &now);
            if !wrong.is_empty() {
                let what = format!("restore {} of {name}", group.name);
                attempt(ethtool.set(&what, link.index, group, &wrong));
            }
        }
        let features = differing(&self.features, &now.features);
        if !features.is_empty() {
            let what = format!("restore features of {name}");
            attempt(ethtool.set_features(&what, link.index, &features));
        }
        let now = Tuning::read(&mut ethtool, link)?;
        warnings.extend(self.differences(&now).map(|what| format!("{name}: {what}")));
        Ok(warnings)
    }

    /// The settings of a group that are not as they were, with the values they had.
    fn wrong(&self, group: &Group, now: &Tuning) -> Settings {
        let none = BTreeMap::new();
        let before = self.groups.get(group.name).unwrap_or(&none);
        let now = now.groups.get(group.name).unwrap_or(&none);
        let differing = differing(before, now);
        let bytes = differing
            .iter()
            .map(|(kind, value)| Some((*kind, of_hexadecimal(value)?)));
        bytes.flatten().collect()
    }

    /// What is not as it was, as text.
    fn differences<'a>(&'a self, now: &'a Tuning) -> impl Iterator<Item = String> + 'a {
        let features = differing(&self.features, &now.features).into_iter();
        let on = |on: bool| if on { "on" } else { "off" };
        let features = features
            .map(move |(name, was)| format!("feature {name} is {}, was {}", on(!was), on(was)));
        let groups = GROUPS
            .iter()
            .filter(|group| !self.wrong(group, now).is_empty());
        let groups = groups.map(|group| match group.can_be_set() {
            true => format!("{} are not as they were", group.name),
            false => format!(
                "{} is not as it was, and the kernel does not set it over netlink; see ethtool -x, \
                 ethtool -X",
                group.name
            ),
        });
        features.chain(groups)
    }
}

/// What is there before and now, with another value now.
fn differing<K: Ord + Clone, V: PartialEq + Clone>(
    before: &BTreeMap<K, V>,
    now: &BTreeMap<K, V>,
) -> BTreeMap<K, V> {
    let differs = |(key, value): &(&K, &V)| now.get(key).is_some_and(|now| now != *value);
    let differing = before.iter().filter(differs);
    differing
        .map(|(key, value)| (key.clone(), value.clone()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_differs_is_set_and_named() {
        let before = Tuning {
            features: [("rx-gro".to_owned(), true), ("rx-lro".to_owned(), false)].into(),
            groups: [
                (
                    "rings".to_owned(),
                    [(6, "00040000".to_owned()), (9, "00040000".to_owned())].into(),
                ),
                (
                    "receive side scaling".to_owned(),
                    [(4, "00".to_owned())].into(),
                ),
            ]
            .into(),
        };
        let mut now = before.clone();
        assert_eq!(before.differences(&now).count(), 0);
        now.features.insert("rx-gro".to_owned(), false);
        now.groups
            .insert("rings".to_owned(), [(6, "00080000".to_owned())].into());
        now.groups.insert(
            "receive side scaling".to_owned(),
            [(4, "01".to_owned())].into(),
        );
        let rings = GROUPS.iter().find(|group| group.name == "rings").unwrap();
        assert_eq!(before.wrong(rings, &now), [(6, vec![0, 4, 0, 0])].into());
        let differences: Vec<String> = before.differences(&now).collect();
        assert_eq!(
            differences.first().map(String::as_str),
            Some("feature rx-gro is off, was on")
        );
        assert!(
            differences
                .iter()
                .any(|text| text.starts_with("rings are not")),
            "{differences:?}"
        );
        assert!(
            differences.iter().any(|text| text.contains("ethtool -X")),
            "{differences:?}"
        );
    }
}
