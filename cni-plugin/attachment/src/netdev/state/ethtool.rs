//! What ethtool(8) sets: features, channels, rings, coalescing, pause frames, private flags, link
//! modes, FEC, receive side scaling.
//!
//! A change of namespaces leaves all of it as it is, and a pod may change it. What a driver does not
//! have is not in the snapshot.

use std::{collections::BTreeMap, io};

use netlink::ethtool::{Ethtool, GROUPS, Settings};

use super::{Entries, Entry, Netdev, Restoration, Written};
use crate::netdev::snapshot::{hexadecimal, of_hexadecimal};

fn open(ethtool: &mut Option<Option<Ethtool>>) -> netlink::Result<Option<&mut Ethtool>> {
    if ethtool.is_none() {
        *ethtool = Some(Ethtool::open()?);
    }
    Ok(ethtool.as_mut().and_then(Option::as_mut))
}

/// The settings of each of [`GROUPS`], as `6=00040000 9=00040000`: attribute and value.
pub(super) fn read_groups(netdev: &mut Netdev<'_>) -> netlink::Result<Entries> {
    let mut groups = Entries::new();
    let Some(ethtool) = open(&mut netdev.ethtool)? else {
        return Ok(groups);
    };
    for group in &GROUPS {
        if let Some(settings) = ethtool.settings(netdev.link.index, group)? {
            groups.push((group.name.to_owned(), text(&settings)));
        }
    }
    Ok(groups)
}

fn text(settings: &Settings) -> String {
    let settings = settings.iter();
    let settings = settings.map(|(kind, value)| format!("{kind}={}", hexadecimal(value)));
    settings.collect::<Vec<_>>().join(" ")
}

/// The settings of a group that are in both and not as they were, with the values that they had.
pub(super) fn differing(before: &str, now: &str) -> Settings {
    let settings = |text: &str| -> Settings {
        let settings = text.split(' ').filter_map(|setting| {
            let (kind, value) = setting.split_once('=')?;
            Some((kind.parse().ok()?, of_hexadecimal(value)?))
        });
        settings.collect()
    };
    let (mut before, now) = (settings(before), settings(now));
    before.retain(|kind, was| now.get(kind).is_some_and(|now| now != was));
    before
}

pub(super) fn restore_group(to: &mut Restoration<'_>, entry: Entry<'_>) -> Written {
    let index = to.netdev.link.index;
    let group = GROUPS.iter().find(|group| group.name == entry.name);
    let (Some(group), Some(ethtool)) = (group, open(&mut to.netdev.ethtool)?) else {
        return Ok(());
    };
    if !group.can_be_set() {
        let cause = "the kernel does not set it over netlink; see ethtool -x, ethtool -X";
        return Err(netlink::Error::call(entry.what, io::Error::other(cause)));
    }
    // A group that was restored before may have brought it along.
    let now = ethtool.settings(index, group)?.unwrap_or_default();
    let wrong = differing(entry.value, &text(&now));
    match wrong.is_empty() {
        true => Ok(()),
        false => ethtool.set(entry.what, index, group, &wrong),
    }
}

/// Features that can be changed, and whether each is wanted.
pub(super) fn read_features(netdev: &mut Netdev<'_>) -> netlink::Result<Entries> {
    let Some(ethtool) = open(&mut netdev.ethtool)? else {
        return Ok(Entries::new());
    };
    let features = ethtool.features(netdev.link.index)?.into_iter();
    let on = |on| if on { "on" } else { "off" };
    Ok(features
        .map(|(name, wanted)| (name, on(wanted).to_owned()))
        .collect())
}

pub(super) fn restore_feature(to: &mut Restoration<'_>, entry: Entry<'_>) -> Written {
    let feature = BTreeMap::from([(entry.name.to_owned(), entry.value == "on")]);
    match open(&mut to.netdev.ethtool)? {
        Some(ethtool) => ethtool.set_features(entry.what, to.netdev.link.index, &feature),
        None => Ok(()),
    }
}
