//! One call takes all addresses of an attachment, or none.
//!
//! What is there already is kept where it is what the order asks for: a repeated
//! ADD gets the same answer, and an ADD that was killed is taken up. Each record
//! leads to its lease entry wherever the call dies, so the owner's DEL finds them all.

use super::allocate::{Goal, Made, Proposed, Search, Want};
use super::dir::Meta;
use super::granted::Granted;
use super::owner::Content;
use super::previous::PreviousLease;
use super::release::CoolDown;
use super::{Store, StoreError};
use crate::lease::{Holder, Lease};
use crate::range::Range;
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
    /// Whom the address is unique among.
    pub space: Space,
    /// The part whose address has the host number that this one's is to have, too, if that is free:
    /// an earlier one of the same family.
    pub like: Option<usize>,
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

#[derive(Debug)]
pub struct Refused {
    /// The part that could not be served, by its number in the order.
    pub part: Option<usize>,
    pub error: StoreError,
}

impl Refused {
    /// Of the part with a number.
    fn of(part: usize) -> impl Fn(StoreError) -> Self + Copy {
        move |error| Self {
            part: Some(part),
            error,
        }
    }
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

    /// For each part, how many addresses of its range all interfaces still need.
    fn missing(&self, attached: &BTreeMap<&str, Attached>) -> Vec<usize> {
        let missing_of = |part: &Part| {
            let alike = |other: &&Part| (&other.range, &other.space) == (&part.range, &part.space);
            let of_interface = |(interface, of): (&&str, &Attached)| {
                let parts = self.parts.iter().filter(alike);
                let wanted = parts.filter(|other| self.interface_of(other) == *interface);
                wanted.count().saturating_sub(of.count_of(part))
            };
            attached.iter().map(of_interface).sum()
        };
        self.parts.iter().map(missing_of).collect()
    }
}

impl Part {
    /// Whether a lease is of the part's range.
    fn is_of(&self, lease: &Lease) -> bool {
        lease.range == self.range.subnet()
            && lease.network_name == self.space.network_name
            && lease.overlapping == self.space.overlapping
    }

    /// Whether the address of such a lease is one that the part may have.
    fn wants(&self, profile: Profile, lease: &Lease) -> bool {
        match self.requested {
            Some(address) => lease.address == address,
            // whereabouts keeps an address that its range has shrunk away from.
            None => profile == Profile::Compatible || self.range.gives(lease.address),
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
    released: Vec<(usize, Lease)>,
    made: Made,
}

impl Attached {
    /// How many leases it has that a part could keep.
    fn count_of(&self, part: &Part) -> usize {
        let there = self.there.iter();
        there.filter(|there| part.is_of(&there.lease)).count()
    }
}

/// A lease of the attachment, of whatever record.
struct There {
    lease: Lease,
    meta: Meta,
    part: usize,
    /// Position of its record among the owner's.
    record: usize,
}

impl Store {
    /// Takes one address for each part of the order, all or none. What the attachment
    /// has already is answered again.
    ///
    /// # Errors
    /// [`Refused`] naming the part. Nothing that was taken now is left, but an error of
    /// a system call may leave records that lead the owner's DEL to what was begun.
    pub fn take(&self, order: &Order) -> Result<Vec<Lease>, Refused> {
        let granted = Granted::new(self);
        let mut attached: BTreeMap<&str, Attached> = BTreeMap::new();
        for part in &order.parts {
            let interface = order.interface_of(part);
            if !attached.contains_key(interface) {
                attached.insert(interface, self.attached(order, interface)?);
            }
        }
        let missing = order.missing(&attached);
        let mut leases: BTreeMap<usize, Lease> = BTreeMap::new();
        let mut interfaces = attached.iter_mut();
        let taken = interfaces
            .try_for_each(|(interface, of)| {
                self.take_interface(order, interface, &granted, &missing, of, &mut leases)
            })
            .and_then(|()| {
                let all = leases.iter().map(|(number, lease)| (*number, lease));
                match granted.lost(&order.parts, all)? {
                    Some((number, error)) => Err(Refused {
                        part: Some(number),
                        error,
                    }),
                    None => Ok(()),
                }
            });
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
        granted: &Granted<'_>,
        missing: &[usize],
        of: &mut Attached,
        leases: &mut BTreeMap<usize, Lease>,
    ) -> Result<(), Refused> {
        let mut open = Vec::new();
        for (number, part) in order.parts.iter().enumerate() {
            if order.interface_of(part) != interface {
                continue;
            }
            let refused = Refused::of(number);
            let range = granted.cut(&part.space, part.range.clone());
            let range = range.map_err(refused)?;
            let kept = self.keep(order.profile, number, part, &mut of.there);
            match kept.map_err(refused)? {
                Some(lease) => drop(leases.insert(number, lease)),
                None => open.push((number, part, range)),
            }
        }
        let holder = of.made.holder().clone();
        let mut searches = Vec::new();
        for (number, part, range) in &open {
            let reused = self.reuse(order.profile, part, &mut of.there);
            match reused.map_err(Refused::of(*number))? {
                Some(lease) => drop(leases.insert(*number, lease)),
                None => {
                    let want = part.want(range, &holder);
                    let mut search = Search::new(self, want, Goal::Lowest, *number);
                    search.like = part.like;
                    searches.push(search);
                }
            }
        }
        self.set_goals(order, granted, &mut searches, &of.released)?;
        for search in &mut searches {
            search.follow(|like| leases.get(&like));
        }
        let taken = self.allocate_all(&mut searches, &mut of.made);
        let taken = taken.map_err(|failed| {
            let search = searches.get(failed.search);
            let part = search.and_then(|search| order.parts.get(search.part));
            let (Some(search), Some(part)) = (search, part) else {
                return Refused::from(failed.error);
            };
            let count = missing.get(search.part).copied().unwrap_or(0).max(1);
            let address = match search.goal {
                Goal::This(address) => Some(address),
                Goal::Lowest | Goal::Rather(_) | Goal::Near(_) => None,
            };
            Refused::of(search.part)(granted.explain(failed.error, part, address, count))
        })?;
        leases.extend(searches.iter().map(|search| search.part).zip(taken));
        Ok(())
    }

    /// What is looked for: the address that was asked for; that of the attachment's earlier
    /// boot or network namespace; that of the pod's previous sandbox, where that may be taken
    /// over; else the lowest that is free.
    fn set_goals(
        &self,
        order: &Order,
        granted: &Granted<'_>,
        searches: &mut [Search<'_>],
        earlier: &[(usize, Lease)],
    ) -> Result<(), Refused> {
        // All are found before any is released: a record that loses one loses its hint.
        let mut found: Vec<(usize, PreviousLease)> = Vec::new();
        for search in searches {
            let (number, profile) = (search.part, order.profile);
            let Some(part) = order.parts.get(number) else {
                continue;
            };
            let refused = Refused::of(number);
            let may_have = |address| granted.has(part, address).map_err(refused);
            if let Some(address) = part.requested {
                if !may_have(address)? {
                    return Err(refused(granted.needs(part, address)));
                }
                search.goal = Goal::This(address);
                continue;
            }
            let mut earlier = earlier.iter().filter(|(of, _)| *of == number);
            if let Some((_, lease)) =
                earlier.find(|(_, lease)| part.is_of(lease) && part.wants(profile, lease))
            {
                search.goal = Goal::Rather(lease.address);
                continue;
            }
            let want = &search.want;
            let other = |lease: &Lease| found.iter().all(|(_, before)| !before.is(lease));
            if let Some(previous) = self.previous_lease(want, other).map_err(refused)?
                && may_take_over(profile, &previous.lease, want.holder, &previous.netns)
                && (profile == Profile::Compatible || part.range.gives(previous.lease.address))
                && may_have(previous.lease.address)?
            {
                search.goal = Goal::Rather(previous.lease.address);
                found.push((number, previous));
            }
        }
        for (number, previous) in &found {
            let released = self.release_previous(previous);
            released.map_err(Refused::of(*number))?;
        }
        Ok(())
    }

    /// Whether [`Store::take`] would find an address for each part now. Takes nothing.
    ///
    /// # Errors
    /// [`StoreError::Exhausted`] or [`StoreError::NeedsBlock`] of the first part that would get
    /// none, or what kept it from being read.
    pub fn room(&self, order: &Order) -> Result<(), Refused> {
        let granted = Granted::new(self);
        let mut proposed = Proposed::default();
        for (number, part) in order.parts.iter().enumerate() {
            let refused = Refused::of(number);
            let range = granted
                .cut(&part.space, part.range.clone())
                .map_err(refused)?;
            self.has_room(&part.want(&range, &order.holder), &mut proposed)
                .map_err(|error| refused(granted.explain(error, part, None, 1)))?;
        }
        Ok(())
    }

    /// What an interface has. Its records stay until DEL, also those that hold nothing: of two
    /// calls that meet, only one may remove a name that the other may make anew.
    fn attached(&self, order: &Order, interface: &str) -> Result<Attached, StoreError> {
        let holder = Holder {
            interface: interface.to_owned(),
            ..order.holder.clone()
        };
        let (mut there, mut released, mut count) = (Vec::new(), Vec::new(), 0);
        for (index, owned) in self.owned(&holder.container, interface)?.iter().enumerate() {
            count += usize::from(owned.is_of_node(&self.node.name));
            let (record, meta) = match &owned.content {
                Content::Record(record, meta) => (record, *meta),
                // An ADD was killed before it wrote it.
                Content::Broken(_, meta) if meta.links < 2 => continue,
                Content::Broken(..) | Content::Foreign(_) => {
                    return Err(StoreError::Foreign {
                        path: owned.path(),
                        what: owned.fault().unwrap_or_default(),
                    });
                }
            };
            // One that fsck gave another number.
            if there
                .iter()
                .any(|known: &There| known.meta.same_file(&meta))
            {
                continue;
            }
            for lease in record.leases() {
                // Reclaim would free it, with an address that was answered once more.
                let is_over = self.is_of_an_earlier_boot(&lease.holder)
                    || is_of_another_netns(&lease.holder, &holder);
                match is_over {
                    true if self.release_address(lease, &meta, CoolDown::FromNow)? => {
                        released.push((lease.part, lease.clone()));
                    }
                    true => {}
                    // The DEL of that network frees it.
                    false if lease.holder.network != holder.network => {}
                    false => there.push(There {
                        lease: lease.clone(),
                        meta,
                        part: lease.part,
                        record: index,
                    }),
                }
            }
        }
        // What was lost comes after what took its place in a later record.
        there.sort_by_key(|there| (there.part, Reverse(there.record)));
        Ok(Attached {
            there,
            released,
            made: Made::of(&holder, count),
        })
    }

    /// The lease that the attachment took for this very part, if it is as it should be.
    fn keep(
        &self,
        profile: Profile,
        number: usize,
        part: &Part,
        there: &mut Vec<There>,
    ) -> Result<Option<Lease>, StoreError> {
        for position in 0..there.len() {
            if let Some(There { lease, meta, .. }) = there.get(position).filter(|there| {
                there.part == number
                    && part.is_of(&there.lease)
                    && part.wants(profile, &there.lease)
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
        there: &mut Vec<There>,
    ) -> Result<Option<Lease>, StoreError> {
        let of_part = |there: &There| part.is_of(&there.lease);
        while let Some(position) = there.iter().position(of_part) {
            let There { lease, meta, .. } = there.remove(position);
            if !part.wants(profile, &lease) {
                // The record stays: numbers of records have no gaps.
                self.release_address(&lease, &meta, CoolDown::FromNow)?;
            } else if self.is_held(&lease, &meta)? {
                return Ok(Some(lease));
            }
        }
        Ok(None)
    }
}

/// Whether an attachment was made in another network namespace of this boot than it is made
/// in now: at another path, or at the same path by another inode.
fn is_of_another_netns(before: &Holder, now: &Holder) -> bool {
    before.boot == now.boot
        && before.netns.is_some()
        && (&before.netns, before.netns_inode) != (&now.netns, now.netns_inode)
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
mod tests;
