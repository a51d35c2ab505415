//! One call takes all addresses of an attachment, or none.
//!
//! What is there already is kept where it is what the order asks for: a repeated
//! ADD gets the same answer, and an ADD that was killed is taken up. Each record
//! leads to its lease entry wherever the call dies, so the owner's DEL finds them all.

use super::allocate::{Goal, Made, Proposed, Search, Survey, Want};
use super::dir::Meta;
use super::owner::{Content, Owned};
use super::previous::PreviousLease;
use super::release::CoolDown;
use super::{Store, StoreError};
use crate::lease::{Holder, Lease};
use crate::range::Range;
use ipnetwork::IpNetwork;
use node::netns::Netns;
use node::policy::Profile;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// The addresses that one attachment is to have. Plain data.
#[derive(Debug, Clone)]
pub struct Order {
    /// For whom. Its interface is that of parts that name none.
    pub holder: Holder,
    /// Whose rules a previous lease of the pod is taken over by.
    pub profile: Profile,
    /// One address each, in the order of the answer.
    pub parts: Vec<Part>,
}

/// One address of an order.
#[derive(Debug, Clone)]
pub struct Part {
    /// The interface it is for, where it is not the holder's.
    pub interface: Option<String>,
    /// Which addresses may be given.
    pub range: Range,
    /// Prefix length of the part of the range that each node has, if it is cut.
    pub slice: Option<u8>,
    /// Whom the address is unique among.
    pub space: Space,
    /// The one address that may be given.
    pub requested: Option<IpAddr>,
}

/// Whom an address is unique among.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Space {
    /// `network_name`: apart from other names, an address may be leased again.
    pub network_name: Option<String>,
    /// `enable_overlapping_ranges`: unique in all ranges of the network name, not in
    /// each.
    pub overlapping: bool,
}

/// Why nothing was taken.
#[derive(Debug)]
pub struct Refused {
    /// The part that could not be served, by its number in the order.
    pub part: Option<usize>,
    /// Why.
    pub error: StoreError,
}

impl From<StoreError> for Refused {
    fn from(error: StoreError) -> Self {
        Self { part: None, error }
    }
}

impl Order {
    fn interface_of<'o>(&'o self, part: &'o Part) -> &'o str {
        part.interface.as_deref().unwrap_or(&self.holder.interface)
    }
}

impl Part {
    /// Its range, or the node's slice of it.
    fn cut_to(&self, slice: Option<IpNetwork>) -> Range {
        match slice {
            Some(slice) => self.range.slice(slice),
            None => self.range.clone(),
        }
    }

    /// Whether a lease is of the part's range, which may be cut to a slice.
    fn is_of(&self, range: &Range, lease: &Lease) -> bool {
        lease.range == range.subnet()
            && lease.network_name == self.space.network_name
            && lease.overlapping == self.space.overlapping
    }

    /// Whether the address of such a lease is one that the part may have.
    fn wants(&self, profile: Profile, range: &Range, lease: &Lease) -> bool {
        match self.requested {
            Some(address) => lease.address == address,
            // whereabouts keeps an address that its range has shrunk away from.
            None => {
                profile == Profile::Compatible
                    || lease.requested
                    || range.window_contains(lease.address)
            }
        }
    }

    pub(super) fn want<'a>(&'a self, range: &'a Range, holder: &'a Holder) -> Want<'a> {
        Want {
            range,
            network_name: self.space.network_name.as_deref(),
            overlapping: self.space.overlapping,
            holder,
        }
    }
}

/// What one interface of the attachment has.
struct Attached {
    /// Leases of records that no part has claimed yet, by the part that they were taken for.
    there: Vec<There>,
    /// Leases that it had in an earlier boot or in another network namespace, which were
    /// released just now, by the part that they were taken for.
    previous: Vec<(usize, Lease)>,
    made: Made,
}

/// A lease of the attachment, of whatever record.
struct There {
    lease: Lease,
    meta: Meta,
    part: usize,
    /// Position of its record among the owner's.
    record: usize,
}

/// A part that needs an address.
struct Missing<'o> {
    number: usize,
    part: &'o Part,
    range: Range,
    slice: Option<IpNetwork>,
    goal: Goal,
}

impl Store {
    /// Takes one address for each part of the order, all or none. What the attachment
    /// has already is answered again.
    ///
    /// # Errors
    /// [`Refused`] naming the part. Nothing that was taken now is left, but an error of
    /// a system call may leave records that lead the owner's DEL to what was begun.
    pub fn take(&self, order: &Order) -> Result<Vec<Lease>, Refused> {
        let mut attached: BTreeMap<&str, Attached> = BTreeMap::new();
        for part in &order.parts {
            let interface = order.interface_of(part);
            if !attached.contains_key(interface) {
                attached.insert(interface, self.attached(order, interface)?);
            }
        }
        let mut leases: BTreeMap<usize, Lease> = BTreeMap::new();
        let mut interfaces = attached.iter_mut();
        let taken = interfaces
            .try_for_each(|(interface, of)| self.take_interface(order, interface, of, &mut leases));
        if let Err(refused) = taken {
            for of in attached.values() {
                self.release_made(&of.made, &refused.error);
            }
            return Err(refused);
        }
        for part in &order.parts {
            let (space, network) = (&part.space, &order.holder.network);
            let network_name = space.network_name.as_deref();
            self.note_pool(&part.range, network_name, space.overlapping, network);
        }
        Ok(leases.into_values().collect())
    }

    /// The parts of one interface, by their number in the order: those that it has, and those
    /// that it takes.
    fn take_interface(
        &self,
        order: &Order,
        interface: &str,
        of: &mut Attached,
        leases: &mut BTreeMap<usize, Lease>,
    ) -> Result<(), Refused> {
        let mut open = Vec::new();
        for (number, part) in order.parts.iter().enumerate() {
            if order.interface_of(part) != interface {
                continue;
            }
            let refused = |error| Refused {
                part: Some(number),
                error,
            };
            let slice = part
                .slice
                .map(|length| self.slice(part.space.network_name.as_deref(), &part.range, length))
                .transpose()
                .map_err(refused)?;
            let range = part.cut_to(slice);
            let kept = self.keep(order.profile, number, part, &range, &mut of.there);
            match kept.map_err(refused)? {
                Some(lease) => drop(leases.insert(number, lease)),
                None => open.push(Missing {
                    number,
                    part,
                    range,
                    slice,
                    goal: Goal::Lowest,
                }),
            }
        }
        let mut missing = Vec::new();
        for open in open {
            let reused = self.reuse(order.profile, open.part, &open.range, &mut of.there);
            let reused = reused.map_err(|error| Refused {
                part: Some(open.number),
                error,
            })?;
            match reused {
                Some(lease) => drop(leases.insert(open.number, lease)),
                None => missing.push(open),
            }
        }
        let holder = of.made.holder().clone();
        self.set_goals(order.profile, &mut missing, &holder, &of.previous)?;
        let searches = missing.iter().map(|missing| {
            let want = missing.part.want(&missing.range, &holder);
            Search::new(self, want, missing.goal, missing.number)
        });
        let mut searches: Vec<Search<'_>> = searches.collect();
        match self.allocate_all(&mut searches, &mut of.made) {
            Ok(taken) => {
                leases.extend(missing.iter().map(|missing| missing.number).zip(taken));
                Ok(())
            }
            Err(failed) => {
                let missing = missing.get(failed.search);
                let slice = missing.and_then(|missing| missing.slice);
                Err(Refused {
                    part: missing.map(|missing| missing.number),
                    error: name_slice(failed.error, slice),
                })
            }
        }
    }

    /// What is looked for: the address that was asked for; that of the attachment's earlier
    /// boot or network namespace; that of the pod's previous sandbox, where that may be taken
    /// over; else the lowest that is free.
    fn set_goals(
        &self,
        profile: Profile,
        missing: &mut [Missing<'_>],
        holder: &Holder,
        earlier: &[(usize, Lease)],
    ) -> Result<(), Refused> {
        // All are found before any is released: a record that loses one loses its hint.
        let mut found: Vec<(usize, PreviousLease)> = Vec::new();
        for missing in missing {
            let number = missing.number;
            let refused = |error| Refused {
                part: Some(number),
                error,
            };
            if let Some(address) = missing.part.requested {
                missing.goal = Goal::This(address);
                continue;
            }
            let (part, range) = (missing.part, &missing.range);
            let mut earlier = earlier.iter().filter(|(of, _)| *of == number);
            if let Some((_, lease)) = earlier
                .find(|(_, lease)| part.is_of(range, lease) && part.wants(profile, range, lease))
            {
                missing.goal = Goal::Rather(lease.address);
                continue;
            }
            let want = missing.part.want(&missing.range, holder);
            let other = |lease: &Lease| found.iter().all(|(_, before)| !before.is(lease));
            if let Some(previous) = self.previous_lease(&want, other).map_err(refused)?
                && may_take_over(profile, previous.lease(), holder, previous.netns())
                && (profile == Profile::Compatible
                    || missing.range.window_contains(previous.lease().address))
            {
                missing.goal = Goal::Rather(previous.lease().address);
                found.push((number, previous));
            }
        }
        for (number, previous) in &found {
            let released = self.release_previous(previous);
            released.map_err(|error| Refused {
                part: Some(*number),
                error,
            })?;
        }
        Ok(())
    }

    /// Whether [`Store::take`] would find an address for each part now. Takes nothing, no
    /// slice either.
    ///
    /// # Errors
    /// [`StoreError::Exhausted`] or [`StoreError::SliceExhausted`] of the first part that
    /// would get none, or what kept it from being read.
    pub fn room(&self, order: &Order) -> Result<(), Refused> {
        let mut proposed = Proposed::default();
        for (number, part) in order.parts.iter().enumerate() {
            let refused = |error| Refused {
                part: Some(number),
                error,
            };
            let slice = self.slice_of_part_to_come(part).map_err(refused)?;
            let range = part.cut_to(slice);
            self.has_room(&part.want(&range, &order.holder), &mut proposed)
                .map_err(|error| refused(name_slice(error, slice)))?;
        }
        Ok(())
    }

    /// What [`Store::take`] would find on its way now, for each part.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub fn survey_order(&self, order: &Order) -> Result<Vec<Survey>, Refused> {
        let mut proposed = Proposed::default();
        let survey = |(number, part): (usize, &Part)| {
            let slice = self.slice_of_part_to_come(part);
            let survey = slice.and_then(|slice| {
                let range = part.cut_to(slice);
                self.survey(&part.want(&range, &order.holder), &mut proposed)
            });
            survey.map_err(|error| Refused {
                part: Some(number),
                error,
            })
        };
        order.parts.iter().enumerate().map(survey).collect()
    }

    /// The slice that this node has or would take of a part's range, if it is cut.
    fn slice_of_part_to_come(&self, part: &Part) -> Result<Option<IpNetwork>, StoreError> {
        let network_name = part.space.network_name.as_deref();
        part.slice
            .map(|length| self.slice_to_come(network_name, &part.range, length))
            .transpose()
    }

    fn attached(&self, order: &Order, interface: &str) -> Result<Attached, StoreError> {
        let holder = Holder {
            interface: interface.to_owned(),
            ..order.holder.clone()
        };
        let container = &holder.container;
        let listed = self.owned(container, interface)?;
        let (records, previous) = without_remains(self, &holder, listed)?;
        let mut there = Vec::new();
        for (index, owned) in records.iter().enumerate() {
            if let Content::Record(record, meta) = &owned.content {
                there.extend(record.leases().iter().map(|lease| There {
                    lease: lease.clone(),
                    meta: *meta,
                    // Format 1 has a record for each part.
                    part: lease.part.unwrap_or(index),
                    record: index,
                }));
            }
        }
        // What was lost comes after what took its place in a later record.
        there.sort_by_key(|there| (there.part, Reverse(there.record)));
        let count = self.owned_here(container, interface)?.len();
        Ok(Attached {
            there,
            previous,
            made: Made::of(&holder, count),
        })
    }

    /// The lease that the attachment took for this very part, if it is as it should be.
    fn keep(
        &self,
        profile: Profile,
        number: usize,
        part: &Part,
        range: &Range,
        there: &mut Vec<There>,
    ) -> Result<Option<Lease>, StoreError> {
        for position in 0..there.len() {
            if let Some(There { lease, meta, .. }) = there.get(position).filter(|there| {
                there.part == number
                    && part.is_of(range, &there.lease)
                    && part.wants(profile, range, &there.lease)
            }) && self.is_held(lease, meta)?
            {
                return Ok(Some(there.remove(position).lease));
            }
        }
        Ok(None)
    }

    /// A lease for the part that the attachment took for another order, or another part.
    fn reuse(
        &self,
        profile: Profile,
        part: &Part,
        range: &Range,
        there: &mut Vec<There>,
    ) -> Result<Option<Lease>, StoreError> {
        let of_part = |there: &There| part.is_of(range, &there.lease);
        while let Some(position) = there.iter().position(of_part) {
            let There { lease, meta, .. } = there.remove(position);
            if !part.wants(profile, range, &lease) {
                // The record stays: numbers of records have no gaps.
                self.release_address(&lease, &meta, CoolDown::FromNow)?;
            } else if self.is_held(&lease, &meta)? {
                return Ok(Some(lease));
            }
        }
        Ok(None)
    }
}

/// Says of an exhausted slice that it is a slice: the rest of the range may be free.
fn name_slice(error: StoreError, slice: Option<IpNetwork>) -> StoreError {
    match (error, slice) {
        (StoreError::Exhausted { range, why }, Some(slice)) => StoreError::SliceExhausted {
            slice: slice.to_string(),
            range,
            why,
        },
        (error, _) => error,
    }
}

/// Drops records from the top of each directory that hold nothing: an ADD or DEL was
/// killed there. Also those of an earlier boot or of another network namespace, by a runtime
/// that gives a container its ID again: reclaim would free them, with addresses that were
/// answered once more. Answers the other records, and the leases that were released, by their
/// part.
fn without_remains(
    store: &Store,
    holder: &Holder,
    there: Vec<Owned>,
) -> Result<(Vec<Owned>, Vec<(usize, Lease)>), StoreError> {
    let (mut left, mut released): (Vec<Owned>, Vec<_>) = (Vec::new(), Vec::new());
    for (index, owned) in there.into_iter().enumerate().rev() {
        let top = left.last().is_none_or(|above| !owned.is_beside(above));
        let first = owned.leases().first();
        let is_over = first.is_some_and(|lease| {
            let before = &lease.holder;
            store.is_of_an_earlier_boot(before) || is_of_another_netns(before, holder)
        });
        if !top || (!is_over && holds_for_good(store, &owned)?) {
            left.push(owned);
            continue;
        }
        let leases = store.release(&owned, CoolDown::FromNow)?.into_iter();
        released.extend(leases.map(|lease| (lease.part.unwrap_or(index), lease)));
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
    Ok((left, released))
}

/// Whether an attachment was made in another network namespace of this boot than it is made
/// in now: at another path, or at the same path by another inode.
fn is_of_another_netns(before: &Holder, now: &Holder) -> bool {
    before.boot == now.boot
        && before.netns.is_some()
        && (&before.netns, before.netns_inode) != (&now.netns, now.netns_inode)
}

/// Whether a record holds one of its leases, after step 4 of ADD was made up for.
fn holds_for_good(store: &Store, owned: &Owned) -> Result<bool, StoreError> {
    if let Content::Record(record, meta) = &owned.content {
        for lease in record.leases() {
            if store.is_held(lease, meta)? {
                return Ok(true);
            }
        }
    }
    Ok(false)
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

    fn open(place: &std::path::Path) -> Store {
        use node::policy::{Policy, Store as StorePolicy};
        std::fs::create_dir_all(place.join("store")).unwrap();
        let store = StorePolicy::File {
            directory: place.join("store"),
            id: None,
            shared: false,
            bounds: node::policy::StoreBounds::default(),
        };
        let mut policy = Policy {
            state_dir: place.join("state"),
            ..Policy::default()
        };
        policy.stores.insert("default".into(), store);
        let root = std::path::Path::new("/");
        let node = node::identity::NodeIdentity::read(root, "n1").unwrap();
        Store::open(&policy, "default", node, root).unwrap()
    }

    /// A store as programs made it that know no other format.
    fn open_of_format_1(place: &std::path::Path) -> Store {
        let text = r#"{"format": "rdma-ipam store", "version": 1, "id": "a1b2", "created": "2025-01-01T00:00:00Z"}"#;
        std::fs::create_dir_all(place.join("store")).unwrap();
        std::fs::write(place.join("store/FORMAT"), text).unwrap();
        open(place)
    }

    fn part(interface: Option<&str>, range: &str, requested: Option<&str>) -> Part {
        let spec = crate::range::Spec {
            range,
            ..crate::range::Spec::default()
        };
        Part {
            interface: interface.map(str::to_owned),
            range: Range::new(&spec, Profile::Strict).unwrap(),
            slice: None,
            space: Space {
                network_name: None,
                overlapping: true,
            },
            requested: requested.map(|address| address.parse().unwrap()),
        }
    }

    fn order(parts: Vec<Part>) -> Order {
        let mut holder = previous("n1", None).holder;
        holder.pod = None;
        Order {
            holder,
            profile: Profile::Strict,
            parts,
        }
    }

    fn addresses(leases: &[Lease]) -> Vec<String> {
        leases
            .iter()
            .map(|lease| lease.address.to_string())
            .collect()
    }

    #[test]
    fn one_call_takes_the_addresses_of_several_interfaces_and_answers_them_again() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        let order = order(vec![
            part(None, "10.0.0.0/24", None),
            part(Some("net2"), "10.0.0.0/24", Some("10.0.0.9")),
            part(Some("net2"), "fd00::/64", None),
            part(None, "10.0.1.0/24", None),
        ]);
        let expected = ["10.0.0.1", "10.0.0.9", "fd00::1", "10.0.1.1"];
        assert_eq!(addresses(&store.take(&order).unwrap()), expected);
        assert_eq!(addresses(&store.take(&order).unwrap()), expected, "again");
        let container = &order.holder.container;
        for (interface, count) in [("net1", 2), ("net2", 2)] {
            assert_eq!(store.held(container, interface).unwrap().len(), count);
            store.give_back(container, interface, "rail0").unwrap();
            assert!(store.owned(container, interface).unwrap().is_empty());
        }
    }

    #[test]
    fn an_order_that_fails_takes_nothing() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        store
            .take(&order(vec![part(None, "10.0.0.0/24", None)]))
            .unwrap();
        let mut rival = order(vec![part(None, "10.0.3.0/24", Some("10.0.3.7"))]);
        rival.holder.container = "rival".into();
        store.take(&rival).unwrap();
        let refused = store
            .take(&order(vec![
                part(None, "10.0.0.0/24", None),
                part(None, "10.0.1.0/24", None),
                part(Some("net2"), "10.0.2.0/24", None),
                part(Some("net2"), "10.0.3.0/24", Some("10.0.3.7")),
            ]))
            .unwrap_err();
        assert_eq!(refused.part, Some(3));
        assert!(matches!(refused.error, StoreError::Held { .. }));
        // What was never answered does not rest.
        let mut next = order(vec![part(None, "10.0.1.0/24", None)]);
        next.holder.container = "next".into();
        assert_eq!(addresses(&store.take(&next).unwrap()), ["10.0.1.1"]);
        let holder = &rival.holder;
        let container = &order(Vec::new()).holder.container;
        assert_eq!(
            addresses(&store.held(container, "net1").unwrap()),
            ["10.0.0.1"]
        );
        assert!(store.owned(container, "net2").unwrap().is_empty());
        assert_eq!(store.held(&holder.container, "net1").unwrap().len(), 1);
    }

    #[test]
    fn what_an_earlier_boot_had_is_leased_anew() {
        let place = tempfile::tempdir().unwrap();
        let mut store = open(place.path());
        store.node.machine = "m1".into();
        let mut order = order(vec![
            part(None, "10.0.0.0/24", None),
            part(None, "10.0.1.0/24", None),
        ]);
        order.holder.machine = "m1".into();
        order.holder.boot = "earlier".into();
        store.take(&order).unwrap();
        order.holder.boot.clone_from(&store.node.boot);
        let answered = addresses(&store.take(&order).unwrap());
        let held = store.held(&order.holder.container, "net1").unwrap();
        assert_eq!(addresses(&held), answered);
        for lease in held {
            assert_eq!(
                lease.holder.boot, store.node.boot,
                "reclaim frees {lease:?}"
            );
        }
        assert_eq!(addresses(&store.take(&order).unwrap()), answered, "again");
    }

    /// As after a runtime was killed and starts the container again, without DEL.
    #[test]
    fn an_attachment_in_another_netns_keeps_its_addresses_and_records_that_netns() {
        for (path, inode) in [("/run/netns/y", 7), ("/run/netns/x", 8)] {
            for format in [1, 2] {
                let place = tempfile::tempdir().unwrap();
                let store = match format {
                    1 => open_of_format_1(place.path()),
                    _ => open(place.path()),
                };
                let mut order = order(vec![
                    part(None, "10.0.0.0/24", None),
                    part(None, "10.0.1.0/24", Some("10.0.1.9")),
                    part(None, "10.0.0.0/24", None),
                ]);
                order.holder.boot.clone_from(&store.node.boot);
                order.holder.netns = Some("/run/netns/x".into());
                order.holder.netns_inode = Some(7);
                let mut other = order.clone();
                other.holder.container = "other".into();
                other.parts.truncate(1);
                assert_eq!(addresses(&store.take(&other).unwrap()), ["10.0.0.1"]);
                let answered = addresses(&store.take(&order).unwrap());
                assert_eq!(answered, ["10.0.0.2", "10.0.1.9", "10.0.0.3"]);
                store.give_back("other", "net1", "rail0").unwrap();

                order.holder.netns = Some(path.into());
                order.holder.netns_inode = Some(inode);
                for _ in 0..2 {
                    assert_eq!(addresses(&store.take(&order).unwrap()), answered);
                    let held = store.held(&order.holder.container, "net1").unwrap();
                    assert_eq!(addresses(&held), answered);
                    for lease in held {
                        assert_eq!(lease.holder, order.holder, "reclaim frees it");
                        assert_eq!(lease.generation, 2, "leased once more, not each time");
                    }
                }
            }
        }
    }

    /// What was imported names no namespace, and another boot's is told by the boot.
    #[test]
    fn a_record_without_a_netns_is_of_any() {
        let holder = |boot: &str, netns: Option<&str>| Holder {
            boot: boot.into(),
            netns: netns.map(str::to_owned),
            ..previous("n1", None).holder
        };
        let now = holder("b", Some("/x"));
        for (before, another) in [
            (holder("b", Some("/x")), false),
            (holder("b", Some("/y")), true),
            (holder("b", None), false),
            (holder("", Some("/y")), false),
            (holder("a", Some("/y")), false),
        ] {
            assert_eq!(is_of_another_netns(&before, &now), another, "{before:?}");
        }
    }

    #[test]
    fn an_order_of_two_parts_of_one_range_has_two_addresses() {
        let place = tempfile::tempdir().unwrap();
        let store = open(place.path());
        let order = order(vec![
            part(Some("net1"), "10.0.0.0/24", None),
            part(Some("net2"), "10.0.0.0/24", None),
            part(Some("net2"), "10.0.0.0/24", None),
        ]);
        let taken = addresses(&store.take(&order).unwrap());
        assert_eq!(taken, ["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
        assert_eq!(addresses(&store.take(&order).unwrap()), taken);
    }
}
