//! Ranges that move from another program to this one: one subnet after the other, so that ADDs do not
//! wait. What fails is done so far, and can be asked for again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipam::range::{bits, from_bits};
use ipam::space::AddressSpace;
use ipnetwork::IpNetwork;
use node::identity::is_name;
use node_wire::{Failure, FailureKind, OldLeases, PartsChanged, Reserved};

use super::{Agent, Message};
use crate::api::{Api, ApiError};
use crate::backend::Backend;
use crate::reserve::{HOST_LOCAL, Import, Outcome, Reservation, WHEREABOUTS};
use crate::whereabouts;

/// Subnets of the largest range. Of an IPv6 range nodes claim in so many.
const MAX_SUBNETS: u32 = 4096;
/// More reasons are not told of.
const MAX_REASONS: usize = 1000;

/// Where it is seen whether an address without a lease is in use.
enum Users<'a> {
    /// Its pod, in the API; or why that does not answer.
    Pods(&'a Api, Option<String>),
    /// The node itself has removed the lease.
    Nobody,
}

impl Agent {
    /// Holds a range, or ends that.
    pub(super) async fn hold(
        &self,
        space: &AddressSpace,
        range: &str,
        reservation: Reservation,
    ) -> Result<PartsChanged, Failure> {
        let mut total = Reserved::default();
        for network in networks(range)? {
            let outcome = self.reserve(space, network, reservation.clone()).await?;
            total.added += outcome.added;
            total.removed += outcome.removed;
        }
        Ok(PartsChanged {
            reserved: Some(total),
            ..PartsChanged::default()
        })
    }

    pub(super) async fn import(
        &self,
        space: &AddressSpace,
        range: &str,
        from: OldLeases,
    ) -> Result<PartsChanged, Failure> {
        let networks = networks(range)?;
        let (source, leases, mut users) = match from {
            OldLeases::Whereabouts { namespace } => {
                let api = self.api_for(space)?;
                let named = space.network_name.as_deref();
                let range = range.parse().map_err(|_| malformed(range))?;
                if !is_name(&namespace) {
                    return Err(malformed(&namespace));
                }
                let leases = whereabouts::leases(api, &namespace, named, range).await;
                let leases = leases.map_err(unread)?;
                (WHEREABOUTS.to_owned(), leases, Users::Pods(api, None))
            }
            OldLeases::HostLocal { network, leases } => {
                let source = format!("{HOST_LOCAL}{}/{network}/", self.context.node.name);
                (source, leases.into_iter().collect(), Users::Nobody)
            }
        };
        let (mut total, mut kept) = (Reserved::default(), Vec::new());
        let name = source.split(':').next().unwrap_or_default();
        for network in networks {
            let within = leases.range(network.network()..=network.broadcast());
            let mut import = Import {
                source: source.clone(),
                leases: within
                    .map(|(address, who)| (*address, who.clone()))
                    .collect(),
                over: BTreeSet::new(),
            };
            let first = self
                .reserve(space, network, Reservation::Import(import.clone()))
                .await?;
            let (mut added, mut removed, mut last) = (first.added, first.removed, first);
            let mut reasons = BTreeMap::new();
            for (address, pod) in &last.stale {
                match users.reason(*address, pod).await {
                    None => drop(import.over.insert((*address, pod.clone()))),
                    Some(why) => drop(reasons.insert(*address, why)),
                }
            }
            if !import.over.is_empty() {
                last = self
                    .reserve(space, network, Reservation::Import(import))
                    .await?;
                (added, removed) = (added + last.added, removed + last.removed);
            }
            total.added += added;
            total.removed += removed;
            total.left += last.left + last.refused.len() as u64;
            let stale = last.stale.iter().filter_map(|(address, _)| {
                let why = reasons.get(address)?;
                Some((
                    address.to_string(),
                    format!("{name} has no lease of it, but {why}"),
                ))
            });
            let refused = last.refused.iter();
            let refused = refused.map(|(address, why)| (address.to_string(), why.clone()));
            kept.extend(stale.chain(refused));
        }
        kept.truncate(MAX_REASONS);
        Ok(PartsChanged {
            kept,
            reserved: Some(total),
            ..PartsChanged::default()
        })
    }

    async fn reserve(
        &self,
        space: &AddressSpace,
        network: IpNetwork,
        reservation: Reservation,
    ) -> Result<Outcome, Failure> {
        let message = |reply| Message::Reserve(network, reservation, reply);
        self.ask_space(space, message).await
    }

    /// The API that whereabouts' objects are in.
    fn api_for(&self, space: &AddressSpace) -> Result<&Api, Failure> {
        match self.stores.get(&space.store).map(|store| &store.backend) {
            Some(Backend::Api(api)) => Ok(api),
            _ => {
                let why = format!(
                    "store {:?} is not of type kubernetes: whereabouts' objects are imported into such a store \
                     only",
                    space.store
                );
                Err(Failure::new(FailureKind::Mismatch, why))
            }
        }
    }
}

impl Users<'_> {
    /// Why an address without a lease may be in use.
    async fn reason(&mut self, address: IpAddr, pod: &str) -> Option<String> {
        let Self::Pods(api, fault) = self else {
            return None;
        };
        if fault.is_none() {
            match whereabouts::use_of(api, pod, address).await {
                Ok(reason) => return reason,
                Err(error) => {
                    *fault = Some(format!("it is not known which pods are there: {error}"))
                }
            }
        }
        fault.clone()
    }
}

fn unread(error: ApiError) -> Failure {
    let remedy = match &error {
        ApiError::Refused { code: 403, .. } => {
            ": install the chart with its profile after-whereabouts, which lets the agent read them"
        }
        _ => "",
    };
    Failure::new(FailureKind::TryAgain, format!("{error}{remedy}"))
}

fn malformed(text: &str) -> Failure {
    let why =
        format!("{text:?} is not as expected: a range as 10.56.0.0/20, a namespace as kube-system");
    Failure::new(FailureKind::Mismatch, why)
}

/// A range, cut into pieces of one subnet each.
fn networks(range: &str) -> Result<Vec<IpNetwork>, Failure> {
    let whole: IpNetwork = range.parse().map_err(|_| malformed(range))?;
    let v4 = whole.is_ipv4();
    let prefix = if v4 { 24 } else { 120 };
    if whole.prefix() >= prefix {
        return Ok(vec![whole]);
    }
    let count = 1_u32.checked_shl((prefix - whole.prefix()).into());
    let Some(count) = count.filter(|count| *count <= MAX_SUBNETS) else {
        let why = format!(
            "{whole} has more than {MAX_SUBNETS} subnets of {prefix} bits: ask for parts of it, each at most a \
             /{}; of an IPv6 range nodes claim in the first {MAX_SUBNETS} subnets",
            prefix - 12
        );
        return Err(Failure::new(FailureKind::Mismatch, why));
    };
    let first = bits(whole.network());
    let network =
        |number: u32| IpNetwork::new(from_bits(v4, first + (u128::from(number) << 8)), prefix).ok();
    Ok((0..count).filter_map(network).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_into_subnets_and_a_larger_one_is_refused() {
        for (range, count, last) in [
            ("10.0.3.16/28", 1, "10.0.3.16/28"),
            ("10.0.0.0/24", 1, "10.0.0.0/24"),
            ("10.0.0.0/22", 4, "10.0.3.0/24"),
            ("10.0.0.0/12", 4096, "10.15.255.0/24"),
            ("fd00::/119", 2, "fd00::100/120"),
            ("fd00::/108", 4096, "fd00::f:ff00/120"),
        ] {
            let all = networks(range).unwrap();
            let last = last.parse().unwrap();
            assert_eq!((all.len(), all.last()), (count, Some(&last)), "{range}");
        }
        for (range, why) in [
            ("10.0.0.0/11", "each at most a /12"),
            ("fd00::/64", "each at most a /108"),
            ("::/0", "each at most a /108"),
            ("10.0.0.0/x", "is not as expected"),
        ] {
            let failure = networks(range).unwrap_err();
            assert!(failure.message.contains(why), "{failure}");
        }
    }
}
