//! `ranges`: the ranges of each rail, for attachments with an interface on each of several rails.
//!
//! Pure. A configuration for some rails is one like any other: it has the ranges of the first rail,
//! then those of the next, so that one order takes an address of each.

use super::{
    BESIDE_PER_NODE, Config, MAX_RANGES, PER_NODE, RANGE_KEYS, gateway, has_own_gateway, one_range,
    refuse_unknown,
};
use crate::range::Range;
use cni_wire::{Code, Error, Section, json::Value};
use node::policy::{MAX_RAIL, Profile};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

/// A range of a rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailRange {
    /// Which addresses may be given.
    pub range: Range,
    pub gateway: Option<IpAddr>,
}

/// Which interface of an attachment gets an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressPosition {
    /// The interface, by its place among those of the attachment.
    pub interface: usize,
    /// The place of the range among those of the interface.
    pub nth: usize,
}

pub(super) fn read(
    ipam: &Section<'_>,
    reserved: &[IpAddr],
    profile: Profile,
) -> Result<BTreeMap<u32, Vec<RailRange>>, Error> {
    let mut rails = BTreeMap::new();
    // A list is what host-local has under this name.
    if let Some(Value::Array(_)) = ipam.value("ranges") {
        return Err(ipam
            .wrong("ranges", "is a list, expected an object")
            .with_details(
                "its keys are numbers of rails, as in {\"0\": {\"range\": \"10.0.0.0/24\"}}",
            ));
    }
    let section = ipam.section("ranges")?;
    for key in section.keys() {
        let rail = key
            .parse()
            .ok()
            .filter(|rail: &u32| *rail <= MAX_RAIL && rail.to_string() == key)
            .ok_or_else(|| section.wrong(key, "is not a rail number from 0 to 255"))?;
        let of_rail = of_rail(&section, key)?;
        if of_rail.is_empty() {
            return Err(section.wrong(key, "has no range"));
        }
        let ranges = of_rail
            .iter()
            .map(|section| one(section, reserved, profile));
        rails.insert(rail, ranges.collect::<Result<_, _>>()?);
    }
    let other = ["range", "ipRanges", PER_NODE, "gateway", "addresses"];
    if !rails.is_empty()
        && let Some(key) = other.into_iter().find(|key| ipam.value(key).is_some())
    {
        return Err(ipam
            .wrong(
                key,
                "stands beside ranges, which has the ranges of each rail",
            )
            .with_details(format!("leave out {key}, or ranges")));
    }
    Ok(rails)
}

/// A rail has one range or a list of them.
fn of_rail<'a>(section: &Section<'a>, key: &str) -> Result<Vec<Section<'a>>, Error> {
    match section.value(key) {
        Some(Value::Array(_)) => section.sections(key),
        _ => Ok(vec![section.section(key)?]),
    }
}

fn one(section: &Section<'_>, reserved: &[IpAddr], profile: Profile) -> Result<RailRange, Error> {
    let known = [&RANGE_KEYS[..], &["gateway"]].concat();
    refuse_unknown(section, &known)?;
    let text: String = section.require("range")?;
    let gateway = gateway(section, profile)?;
    let reserved: Vec<IpAddr> = reserved.iter().copied().chain(gateway).collect();
    let range = one_range(section, &text, &reserved, profile)?;
    if let Some(gateway) = gateway.filter(|gateway| gateway.is_ipv4() != range.subnet().is_ipv4()) {
        let rule = format!(
            "{gateway} is of another family than its range {}",
            range.subnet()
        );
        return Err(section.wrong("gateway", rule));
    }
    if gateway.is_some() && has_own_gateway(&range) {
        return Err(section.wrong("gateway", BESIDE_PER_NODE));
    }
    Ok(RailRange { range, gateway })
}

impl Config {
    /// The rails that have ranges; none where all have the same.
    #[must_use]
    pub fn rails(&self) -> Option<BTreeSet<u32>> {
        (!self.by_rail.is_empty()).then(|| self.by_rail.keys().copied().collect())
    }

    /// Every range that is given from.
    pub fn all_ranges(&self) -> impl Iterator<Item = &Range> {
        let of_rails = self.by_rail.values().flatten().map(|of| &of.range);
        self.ranges.iter().chain(of_rails)
    }

    /// What it asks for of an attachment with an interface on each of these rails.
    ///
    /// # Errors
    /// Code 7: a rail has no ranges, or there are too many in all.
    pub fn for_rails(&self, rails: &[u32]) -> Result<Config, Error> {
        let mut config = Config {
            ranges: Vec::new(),
            by_rail: BTreeMap::new(),
            ..self.clone()
        };
        if !self.fixed.is_empty() {
            return Err(Error::new(
                Code::InvalidConfig,
                "ipam.addresses: no two interfaces can have the same address",
            )
            .with_details("leave addresses out, or leave devices out for one interface"));
        }
        for (interface, rail) in rails.iter().enumerate() {
            let of_rail: Vec<RailRange> = match (self.by_rail.is_empty(), self.by_rail.get(rail)) {
                (true, _) => self
                    .ranges
                    .iter()
                    .map(|range| RailRange {
                        range: range.clone(),
                        gateway: None,
                    })
                    .collect(),
                (false, Some(ranges)) => ranges.clone(),
                (false, None) => {
                    return Err(Error::new(
                        Code::InvalidConfig,
                        format!("ipam.ranges has nothing for rail {rail}"),
                    )
                    .with_details(format!("add the key \"{rail}\"")));
                }
            };
            for (nth, of) in of_rail.into_iter().enumerate() {
                config.ranges.push(of.range);
                config.gateways.push(of.gateway);
                config.places.push(AddressPosition { interface, nth });
            }
        }
        if config.ranges.len() > MAX_RANGES {
            return Err(Error::new(
                Code::InvalidConfig,
                format!(
                    "{} interfaces have {} addresses; one attachment has at most {MAX_RANGES}",
                    rails.len(),
                    config.ranges.len()
                ),
            )
            .with_details("leave out ranges that the pod does not need"));
        }
        Ok(config)
    }

    /// What it asks for of an attachment that is on all of its rails; itself, where all rails have
    /// the same ranges.
    pub fn for_all_rails(&self) -> Result<Config, Error> {
        match self.rails() {
            None => Ok(self.clone()),
            Some(rails) => self.for_rails(&rails.into_iter().collect::<Vec<_>>()),
        }
    }

    /// The range whose address has the host number that the one of this range is to have, too: that
    /// of the first interface, where it has another network of the same family in its place.
    #[must_use]
    pub fn like(&self, number: usize) -> Option<usize> {
        let place = self
            .places
            .get(number)
            .filter(|place| place.interface > 0)?;
        let first = AddressPosition {
            interface: 0,
            ..*place
        };
        let like = self.places.iter().position(|place| *place == first)?;
        let (own, other) = (
            self.ranges.get(number)?.subnet(),
            self.ranges.get(like)?.subnet(),
        );
        (own != other && own.is_ipv4() == other.is_ipv4()).then_some(like)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::strict;
    use super::*;
    use serde_json::{Value, json};

    fn by_rail() -> Value {
        json!({"ranges": {
            "0": [{"range": "10.0.0.0/24", "gateway": "10.0.0.1"}, {"range": "fd00::/64"}],
            "1": [{"range": "10.0.1.0/24", "gateway": "10.0.1.1"}, {"range": "fd01::/64"}],
            "7": {"range": "10.0.7.0/24", "range_start": "10.0.7.9", "exclude": ["10.0.7.9"]},
        }})
    }

    fn subnets(config: &Config) -> Vec<String> {
        let subnets = config.ranges.iter().map(|range| range.subnet().to_string());
        subnets.collect()
    }

    #[test]
    fn each_rail_has_ranges_and_gateways_of_its_own() {
        let config = strict(by_rail()).unwrap();
        assert_eq!(
            config.rails().unwrap().into_iter().collect::<Vec<_>>(),
            [0, 1, 7]
        );
        assert!(config.ranges.is_empty());
        let two = config.for_rails(&[1, 7]).unwrap();
        assert_eq!(subnets(&two), ["10.0.1.0/24", "fd01::/64", "10.0.7.0/24"]);
        assert_eq!(two.gateways, [Some([10, 0, 1, 1].into()), None, None]);
        // The gateway is no pod's.
        assert!(!two.ranges[0].gives([10, 0, 1, 1].into()));
        assert_eq!(two.ranges[2].lowest(), Some([10, 0, 7, 10].into()));
        assert_eq!(
            (two.like(0), two.like(1), two.like(2)),
            (None, None, Some(0))
        );
        let all = config.for_all_rails().unwrap();
        assert_eq!(all.ranges.len(), config.all_ranges().count());
        let error = config.for_rails(&[2]).unwrap_err();
        assert!(error.msg.contains("nothing for rail 2"), "{error}");
    }

    #[test]
    fn one_range_serves_all_rails() {
        let config = strict(
            json!({"range": "10.0.0.0/24", "ipRanges": [{"range": "fd00::/64"}],
            "gateway": "10.0.0.1"}),
        )
        .unwrap();
        assert_eq!(config.rails(), None);
        let two = config.for_rails(&[0, 1]).unwrap();
        assert_eq!(
            subnets(&two),
            ["10.0.0.0/24", "fd00::/64", "10.0.0.0/24", "fd00::/64"]
        );
        assert!((0..4).all(|number| two.like(number).is_none()));
        let rails: Vec<u32> = (0..33).collect();
        let error = config.for_rails(&rails).unwrap_err();
        assert!(error.msg.contains("66 addresses"), "{error}");
    }

    #[test]
    fn wrong_ranges_of_rails_are_refused_with_their_place() {
        let one = json!({"range": "10.0.0.0/24"});
        for (ipam, part) in [
            (
                json!({"ranges": [[{"subnet": "10.0.0.0/24"}]]}),
                "is a list",
            ),
            (json!({"ranges": {"x": one}}), "ipam.ranges.x"),
            (json!({"ranges": {"00": one}}), "ipam.ranges.00"),
            (json!({"ranges": {"256": one}}), "ipam.ranges.256"),
            (json!({"ranges": {"0": []}}), "has no range"),
            (json!({"ranges": {"0": {}}}), "ipam.ranges.0.range"),
            (
                json!({"ranges": {"0": {"subnet": "10.0.0.0/24"}}}),
                "subnet",
            ),
            (
                json!({"ranges": {"0": one}, "range": "10.9.0.0/24"}),
                "ipam.range",
            ),
            (
                json!({"ranges": {"0": one}, "gateway": "10.0.0.1"}),
                "ipam.gateway",
            ),
            (
                json!({"ranges": {"0": {"range": "10.0.0.0/24", "gateway": "fd00::1"}}}),
                "another family",
            ),
            (json!({"ranges": {}}), "neither range"),
        ] {
            let error = strict(ipam.clone()).unwrap_err();
            assert!(error.msg.contains(part), "{ipam}: {}", error.msg);
        }
        let fixed = json!({"range": "10.0.0.0/24", "addresses": [{"address": "10.0.0.9/24"}]});
        let error = strict(fixed).unwrap().for_rails(&[0]).unwrap_err();
        assert!(error.msg.contains("ipam.addresses"), "{error}");
    }
}
