//! ADD: what is there already, what was asked for, what has to be leased.

use super::answer::to_error;
use crate::config::{Config, Requested, Source};
use crate::lease::{Holder, Lease};
use crate::range::{IpAddrWithLength, Range};
use crate::store::{Owned, Store, StoreError, Want};
use cni_wire::{Cidr, CniResult, Code, Error, IpConfig, Request};
use node::netns::Netns;
use node::policy::Profile;
use std::net::IpAddr;

/// Leases what the configuration asks for and puts the result together.
pub(super) fn add(
    request: &Request,
    config: &Config,
    store: &Store,
    holder: &Holder,
) -> Result<CniResult, Error> {
    let requested = Requested::read(request, config.profile)?;
    let asked = assign(&requested.instead, config)?;
    let leases = match lease_all(config, store, holder, &asked) {
        Ok(leases) => leases,
        Err((error, range)) => {
            let attempt = match range {
                Some(range) => format!("lease an address of {} for {holder}", range.subnet()),
                None => format!("look for the addresses of {holder}"),
            };
            return Err(to_error(&error, attempt));
        }
    };
    let mut result = CniResult {
        routes: config.routes.clone(),
        dns: config.dns.clone(),
        ..CniResult::default()
    };
    for lease in &leases {
        result.ips.push(IpConfig {
            address: Cidr {
                addr: lease.address,
                prefix: lease.prefix,
            },
            gateway: config.gateway_for(lease.address),
            interface: None,
        });
    }
    result.ips.extend(config.fixed.iter().cloned());
    result.ips.extend(requested.besides);
    Ok(result)
}

/// What is wanted of one range.
pub(super) fn want<'a>(
    range: &'a Range,
    config: &'a Config,
    holder: &'a Holder,
    index: usize,
) -> Want<'a> {
    Want {
        range,
        network_name: config.network_name.as_deref(),
        overlapping: config.overlapping,
        holder,
        index,
    }
}

/// The range, or this node's slice of it.
fn part_of_node(range: &Range, config: &Config, store: &Store) -> Result<Range, StoreError> {
    let Some(length) = config.slice else {
        return Ok(range.clone());
    };
    let slice = store.slice(config.network_name.as_deref(), range, length)?;
    Ok(range.slice(slice))
}

/// The same without taking a slice.
pub(super) fn part_to_come(
    range: &Range,
    config: &Config,
    store: &Store,
) -> Result<Range, StoreError> {
    let Some(length) = config.slice else {
        return Ok(range.clone());
    };
    let slice = store.slice_to_come(config.network_name.as_deref(), range, length)?;
    Ok(range.slice(slice))
}

/// Which range each requested address is to come from.
fn assign(
    requested: &[(IpAddrWithLength, Source)],
    config: &Config,
) -> Result<Vec<Option<IpAddr>>, Error> {
    let mut asked = vec![None; config.ranges.len()];
    for ((address, length), source) in requested {
        let refuse = |why: String| {
            let code = match source {
                Source::CniArgs => Code::InvalidEnvironment,
                Source::Runtime | Source::Annotation => Code::InvalidConfig,
            };
            Error::new(code, format!("{}: {address} {why}", source.as_str()))
        };
        let mut fits = config
            .ranges
            .iter()
            .zip(&mut asked)
            .filter(|(range, asked)| asked.is_none() && range.subnet().contains(*address));
        let Some((range, slot)) = fits.next() else {
            let ranges: Vec<String> = config
                .ranges
                .iter()
                .map(|range| range.subnet().to_string())
                .collect();
            return Err(
                refuse(format!("lies in none of the ranges {}", ranges.join(", ")))
                    .with_details("one address may be asked for from each range"),
            );
        };
        let subnet = range.subnet();
        if length.is_some_and(|length| length != subnet.prefix()) {
            return Err(refuse(format!(
                "has another prefix length than its range {subnet}"
            )));
        }
        if !range.may_be_requested(*address) {
            return Err(refuse(format!("is the first or last address of {subnet}")));
        }
        if config.profile == Profile::Strict && config.gateway == Some(*address) {
            return Err(refuse("is the gateway".to_owned()));
        }
        *slot = Some(*address);
    }
    Ok(asked)
}

/// One lease from each range, all or none.
fn lease_all<'c>(
    config: &'c Config,
    store: &Store,
    holder: &Holder,
    asked: &[Option<IpAddr>],
) -> Result<Vec<Lease>, (StoreError, Option<&'c Range>)> {
    let mut there = store
        .owned(&holder.container, &holder.interface)
        .and_then(|there| without_remains(store, there))
        .map_err(|error| (error, None))?;
    let kept = store
        .owned_here(&holder.container, &holder.interface)
        .map_err(|error| (error, None))?
        .len();
    let mut next = kept;
    let mut leases = Vec::new();
    for (range, asked) in config.ranges.iter().zip(asked) {
        let one = part_of_node(range, config, store).and_then(|part| {
            if let Some(lease) = reuse(config, store, &part, *asked, &mut there)? {
                return Ok(lease);
            }
            let want = want(&part, config, holder, next);
            let lease = lease_one(config.profile, store, &want, *asked)?;
            next += 1;
            Ok(lease)
        });
        match one {
            Ok(lease) => {
                let network_name = config.network_name.as_deref();
                store.note_pool(range, network_name, config.overlapping, &holder.network);
                leases.push(lease);
            }
            Err(error) => {
                give_back(store, holder, kept);
                return Err((error, Some(range)));
            }
        }
    }
    Ok(leases)
}

/// Drops records from the top of each directory that hold nothing: an ADD or DEL was
/// killed there.
fn without_remains(store: &Store, there: Vec<Owned>) -> Result<Vec<Owned>, StoreError> {
    let mut left: Vec<Owned> = Vec::new();
    for owned in there.into_iter().rev() {
        let top = left.last().is_none_or(|above| !owned.is_beside(above));
        if !top || store.is_held(&owned)? {
            left.push(owned);
            continue;
        }
        store.release_owned(&owned)?;
        if store.still_there(&owned)? {
            return Err(StoreError::Foreign {
                path: owned.path(),
                what: owned
                    .fault()
                    .unwrap_or_else(|| "a record that stays".to_owned()),
            });
        }
    }
    left.reverse();
    Ok(left)
}

/// A lease of the range that the attachment has already.
fn reuse(
    config: &Config,
    store: &Store,
    range: &Range,
    asked: Option<IpAddr>,
    there: &mut Vec<Owned>,
) -> Result<Option<Lease>, StoreError> {
    let of_range = |owned: &Owned| {
        owned.lease().is_some_and(|lease| {
            lease.range == range.subnet()
                && lease.network_name == config.network_name
                && lease.overlapping == config.overlapping
        })
    };
    let Some(position) = there.iter().position(of_range) else {
        return Ok(None);
    };
    let owned = there.remove(position);
    let Some(lease) = owned.lease() else {
        return Ok(None);
    };
    let wanted = match asked {
        Some(address) => lease.address == address,
        // whereabouts keeps an address that its range has shrunk away from.
        None => {
            config.profile == Profile::Compatible
                || lease.requested
                || range.window_contains(lease.address)
        }
    };
    if wanted && store.is_held(&owned)? {
        return Ok(Some(lease.clone()));
    }
    store.vacate(&owned)?;
    Ok(None)
}

fn lease_one(
    profile: Profile,
    store: &Store,
    want: &Want<'_>,
    asked: Option<IpAddr>,
) -> Result<Lease, StoreError> {
    if let Some(address) = asked {
        return store.allocate_this(want, address);
    }
    if let Some(previous) = store.previous_lease(want)?
        && may_take_over(profile, previous.lease(), want.holder, previous.netns())
        && (profile == Profile::Compatible || want.range.window_contains(previous.lease().address))
    {
        let address = previous.lease().address;
        store.end(&previous)?;
        match store.allocate_this(want, address) {
            Err(StoreError::Held { .. }) => {}
            other => return other,
        }
    }
    store.allocate(want)
}

/// Whether a new sandbox may take over the address of a pod's previous one.
///
/// A sandbox whose namespace is there keeps its address. By name alone a pod could
/// get the address of its namesake that is still alive on another node. So it must
/// be the same pod (UID), or the previous sandbox must be known to be gone. Without
/// UIDs the runtime of one node has one sandbox of a pod at a time; whereabouts,
/// whose records have no UID, goes by the name wherever the pod is.
fn may_take_over(profile: Profile, previous: &Lease, now: &Holder, netns: &Netns) -> bool {
    if *netns == Netns::Present {
        return false;
    }
    let gone = *netns == Netns::Gone;
    let same_node = previous.holder.node == now.node;
    let uid = |holder: &Holder| holder.pod.as_ref().and_then(|pod| pod.uid.clone());
    match (uid(&previous.holder), uid(now)) {
        (Some(before), Some(now)) if before == now => {
            same_node || gone || profile == Profile::Compatible
        }
        (Some(_), Some(_)) => same_node && gone,
        _ => same_node || profile == Profile::Compatible,
    }
}

/// Frees what a failed ADD leased.
fn give_back(store: &Store, holder: &Holder, kept: usize) {
    // The first error is the one to report. What cannot be given back now leads
    // the runtime's DEL to it.
    let own = store.owned_here(&holder.container, &holder.interface);
    if let Ok(there) = own {
        for owned in there.iter().skip(kept).rev() {
            let _ = store.release_owned(owned);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Pod;

    fn previous(node: &str, uid: Option<&str>) -> Lease {
        let mut lease = crate::lease::tests::lease("10.0.0.5", "10.0.0.0/24");
        lease.holder.node = node.into();
        lease.holder.pod = Some(Pod {
            namespace: "a".into(),
            name: "b".into(),
            uid: uid.map(str::to_owned),
        });
        lease
    }

    #[test]
    fn an_address_goes_to_the_next_sandbox_of_the_same_pod_only() {
        let here = previous("n1", Some("u1")).holder;
        let anonymous = previous("n1", None).holder;
        let unknown = Netns::Unknown("");
        for (before, now, netns, strict, compatible) in [
            (previous("n1", Some("u1")), &here, &unknown, true, true),
            (previous("n1", Some("u1")), &here, &Netns::Gone, true, true),
            (
                previous("n1", Some("u1")),
                &here,
                &Netns::Present,
                false,
                false,
            ),
            (previous("n1", Some("u2")), &here, &unknown, false, false),
            (previous("n1", Some("u2")), &here, &Netns::Gone, true, true),
            (
                previous("n1", Some("u2")),
                &here,
                &Netns::Present,
                false,
                false,
            ),
            (previous("n2", Some("u1")), &here, &unknown, false, true),
            (previous("n2", Some("u2")), &here, &unknown, false, false),
            (previous("n1", None), &anonymous, &unknown, true, true),
            (
                previous("n1", None),
                &anonymous,
                &Netns::Present,
                false,
                false,
            ),
            (previous("n2", None), &anonymous, &unknown, false, true),
        ] {
            for (profile, expected) in
                [(Profile::Strict, strict), (Profile::Compatible, compatible)]
            {
                assert_eq!(
                    may_take_over(profile, &before, now, netns),
                    expected,
                    "{profile:?} {netns:?} {before:?}"
                );
            }
        }
    }
}
