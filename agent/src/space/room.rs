//! Questions of ADDs: claims, and asking other nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ipam::owned::{self, OwnedPart};
use ipam::range::gateway_in;
use ipam::space::single;
use ipam::subnet::{
    Change, Changed, Document, Holder, Refused, Want, Wanted, change, claim_size, subnet_of,
    subnets,
};
use ipnetwork::IpNetwork;
use node::random::random64;
use node_wire::{FailureKind, Room};

use super::{Fault, RETRY_INTERVAL, Space, Swapped};
use crate::decide::{self, Candidate, MAX_ASKED, Mode, WANT_LIMIT};
use crate::goal::{Asking, Goal, Phase};
use crate::reserve;

/// When a part is asked for again that enough nodes ask for.
const CROWDED_INTERVAL: Duration = Duration::from_secs(1);
/// How long the first nodes that were asked are waited for, before others are asked, too.
const ROUND: Duration = Duration::from_secs(10);

/// What became of an attempt to claim.
enum Attempt {
    /// Something changed: see what is owned now.
    Again,
    NoRoom(Document),
    Refused(Refused, Document),
}

impl Space {
    /// One step towards room of a range.
    pub(super) fn pursue(&mut self, goal: &mut Goal, now: Instant) -> Result<(), Fault> {
        goal.fault = None;
        let owned = self.owned()?;
        let boot = &self.context.node.boot;
        let unconfirmed = owned
            .parts
            .iter()
            .find(|(piece, part)| part.boot != *boot && goal.range.size_within(**piece) > 0);
        if let Some((piece, _)) = unconfirmed {
            let subnet = subnet_of(piece.ip());
            self.visit(subnet, Mode::Usual, now)?;
            match self.is_restored(subnet) {
                true => return Err(format!("the document of {subnet} is older than before")),
                false => return Ok(()),
            }
        }
        let networks = owned
            .parts
            .iter()
            .filter(|(piece, part)| is_network_of(goal, **piece, part));
        let networks: Vec<IpNetwork> = networks.map(|(piece, _)| *piece).collect();
        self.set_gateways(goal, &networks)?;
        let owned = self.owned()?;
        let of = owned.cut(&goal.range, &self.context.node.name, boot);
        let has = match goal.room {
            Room::Exact(address) => {
                u64::from(owned.has(&goal.range, address, &self.context.node.name, boot))
            }
            Room::Addresses(_) | Room::Network(_) => {
                let parts = owned.parts.keys().map(|piece| subnet_of(piece.ip()));
                let subnets: BTreeSet<IpNetwork> =
                    parts.filter(|subnet| of.size_within(*subnet) > 0).collect();
                let mut busy = BTreeMap::new();
                for subnet in subnets {
                    busy.extend(self.busy(subnet)?);
                }
                decide::free(&of, &busy)
            }
        };
        let asking = matches!(goal.phase, Phase::Ask(_))
            .then(|| std::mem::replace(&mut goal.phase, Phase::Claim(0)));
        let missing = goal.serve(has);
        if let Some(Phase::Ask(asking)) = asking {
            let is_granted = owned.parts.values().any(|part| part.id == asking.id);
            match (is_granted, missing) {
                // What is missing still is asked for by another ID, of parts as they are now.
                (true, _) => {}
                (false, 0) => self.withdraw(&asking),
                (false, _) => goal.phase = Phase::Ask(asking),
            }
        }
        if missing == 0 {
            return Ok(());
        }
        if let Some(network) = networks.first() {
            let why = format!("the network {network} of this node is used up");
            goal.fail(FailureKind::Exhausted, &why, now);
            return Ok(());
        }
        let own = of.size();
        match &mut goal.phase {
            Phase::Scan(left) => {
                let subnet = match left {
                    None => {
                        let all = self.call(|backend| {
                            backend.subnets(&self.space, &self.context.node.name)
                        })?;
                        let inside = |subnet: &IpNetwork| goal.range.size_within(*subnet) > 0;
                        *left = Some(all.into_iter().filter(inside).collect());
                        return Ok(());
                    }
                    Some(left) => left.pop(),
                };
                match subnet {
                    Some(subnet) => drop(self.visit(subnet, Mode::Usual, now)?),
                    None => goal.phase = Phase::Claim(0),
                }
                Ok(())
            }
            Phase::Claim(at) => {
                if *at == self.pace().reads && goal.full.is_none() {
                    goal.full = Some(self.call(|backend| backend.full(&self.space))?);
                }
                let is_full = |subnet: &IpNetwork| {
                    goal.full.as_ref().is_some_and(|full| full.contains(subnet))
                };
                let next = match goal.room {
                    Room::Exact(address) => (*at == 0).then(|| (0, subnet_of(address))),
                    // The last pass ended with nothing: others are read, and their nodes asked.
                    _ => subnets(&goal.range, &self.context.node.name, goal.first)
                        .enumerate()
                        .skip(*at)
                        .find(|(_, subnet)| !is_full(subnet)),
                };
                let Some((number, subnet)) = next else {
                    return self.ask_others(goal, missing, own, now);
                };
                *at = number;
                match self.claim(goal, subnet, missing, own, now)? {
                    Attempt::Again => {}
                    Attempt::NoRoom(document) => {
                        let name = &self.context.node.name;
                        let found = decide::candidates(&document, name, &goal.range);
                        goal.note_held(&document);
                        goal.candidates.extend(found);
                        goal.phase = match goal.phase {
                            Phase::Claim(at) => Phase::Claim(at + 1),
                            _ => Phase::Claim(0),
                        };
                    }
                    Attempt::Refused(refused, document) => {
                        self.refused(goal, &refused, &document, now)?;
                    }
                }
                Ok(())
            }
            Phase::Ask(_) => self.poll(goal, missing, own, now),
        }
    }

    /// The gateway of a node's network is this node's matter, and a part that was assigned has none.
    fn set_gateways(&self, goal: &Goal, networks: &[IpNetwork]) -> Result<(), Fault> {
        let Some(per_node) = goal.range.per_node().filter(|_| !networks.is_empty()) else {
            return Ok(());
        };
        let set = owned::change(
            &self.leases,
            &self.context.state_dir,
            &self.space,
            |owned, _| {
                for (piece, part) in &mut owned.parts {
                    if let Some(network) =
                        part.network.as_mut().filter(|_| networks.contains(piece))
                    {
                        network.gateway = gateway_in(per_node, *piece);
                    }
                }
            },
        );
        set.map_err(|error| error.to_string())
    }

    fn claim(
        &mut self,
        goal: &mut Goal,
        subnet: IpNetwork,
        missing: u64,
        own: u128,
        now: Instant,
    ) -> Result<Attempt, Fault> {
        let before = self.owned()?.parts;
        let read = self.visit(subnet, Mode::Usual, now)?;
        // A piece was handed over, or a claim is done whose answer was lost.
        if self.owned()?.parts != before {
            return Ok(Attempt::Again);
        }
        if self.is_restored(subnet) {
            return Ok(Attempt::NoRoom(Document::empty("", "", subnet)));
        }
        let size = self.size(goal, missing, own);
        let what = match goal.room {
            Room::Exact(address) => Wanted::Exact(single(address)),
            Room::Network(_) => Wanted::Network(goal.range.clone()),
            Room::Addresses(_) => {
                let range = goal.range.clone();
                Wanted::Size { size, range }
            }
        };
        let by = self.holder(&goal.id);
        let mut wanted = Change::Claim { by, what };
        let made = match change(&read.document, &wanted) {
            Err(Refused::NoRoom { .. } | Refused::Held { .. }) => {
                if let Some(take) = self.part_to_take(&read.document, &goal.range, now)? {
                    if let Change::Take { by, .. } = &take {
                        goal.id.clone_from(&by.id);
                    }
                    wanted = take;
                }
                change(&read.document, &wanted)
            }
            made => made,
        };
        match made {
            Ok(Changed {
                document: Some(next),
                ..
            }) => {
                match self.swap(&read, next, vec![goal.id.clone()])? {
                    Swapped::Denied(why) => return Err(why),
                    Swapped::Won(written) => {
                        goal.lost = 0;
                        self.settle(written, Mode::Usual, now)?;
                        goal.id = self.ids.new_id();
                    }
                    Swapped::Lost => {
                        goal.due = now + decide::backoff(goal.lost, random64());
                        goal.lost += 1;
                    }
                }
                Ok(Attempt::Again)
            }
            Ok(_) => {
                goal.id = self.ids.new_id();
                Ok(Attempt::Again)
            }
            Err(Refused::NoRoom { .. }) => Ok(Attempt::NoRoom(read.document)),
            Err(refused) => Ok(Attempt::Refused(refused, read.document)),
        }
    }

    fn size(&self, goal: &Goal, missing: u64, own: u128) -> u16 {
        let missing = u16::try_from(missing.min(64)).unwrap_or(64);
        let missing = missing.checked_next_power_of_two().unwrap_or(64);
        let nodes = (own == 0).then(|| self.backend.nodes()).flatten();
        claim_size(goal.range.size(), nodes, own).max(missing)
    }

    pub(super) fn holder(&self, id: &str) -> Holder {
        Holder {
            node: self.context.node.name.clone(),
            id: id.to_owned(),
        }
    }

    /// A certain address is another's.
    fn refused(
        &mut self,
        goal: &mut Goal,
        refused: &Refused,
        document: &Document,
        now: Instant,
    ) -> Result<(), Fault> {
        match refused {
            Refused::Held { part, node } if *node != self.context.node.name => {
                let mut found = decide::candidates(document, &self.context.node.name, &goal.range);
                found.retain(|one| one.part == *part);
                if let (Some(one), Room::Exact(address)) = (found.first_mut(), goal.room) {
                    one.among = (address, address);
                }
                goal.candidates = found;
                return self.ask_others(goal, 1, 0, now);
            }
            Refused::Held { .. } | Refused::Stale { .. } => {
                goal.fault = Some(format!("{refused}; try again"));
                goal.due = now + RETRY_INTERVAL;
            }
            Refused::Reserved { part, why } if reserve::is_held(why) => {
                let why = held_text(goal.range.subnet(), *part);
                goal.fail(FailureKind::TryAgain, &why, now);
            }
            _ => goal.fail(FailureKind::HeldByAnotherNode, &refused.to_string(), now),
        }
        Ok(())
    }

    /// No subnet of the range has a free piece.
    fn ask_others(
        &mut self,
        goal: &mut Goal,
        missing: u64,
        own: u128,
        now: Instant,
    ) -> Result<(), Fault> {
        let range = goal.range.subnet();
        let found = std::mem::take(&mut goal.candidates);
        let owners = found.len();
        let mut next = self.without_gone(found, now);
        if next.is_empty() || matches!(goal.room, Room::Network(_)) {
            if let Some(held) = goal.held {
                // It ends, unlike the range.
                goal.fail(FailureKind::TryAgain, &held_text(range, held), now);
                return Ok(());
            }
            let why = match goal.room {
                Room::Network(of) => format!("{range} has no free network of length {}", of.prefix),
                _ => format!(
                    "{range} is exhausted: this node has {own} of {} addresses, {missing} more are needed, \
                     and no other node has one",
                    goal.range.size()
                ),
            };
            let name = &self.context.node.name;
            let mut all = subnets(&goal.range, name, goal.first).take(self.pace().reads);
            match all.find(|subnet| self.is_restored(*subnet)) {
                None if owners > 0 && next.is_empty() => {
                    let why = format!(
                        "{range}: the nodes that have its addresses are gone; after {} s this node takes what it \
                         needs",
                        self.context.grace.as_secs()
                    );
                    goal.fail(FailureKind::TryAgain, &why, now);
                }
                None => goal.fail(FailureKind::Exhausted, &why, now),
                Some(subnet) => {
                    let why = format!(
                        "{range}: the document of {subnet} is older than one that was read before; nothing is \
                         claimed in it for 15 minutes"
                    );
                    goal.fail(FailureKind::TryAgain, &why, now);
                }
            }
            return Ok(());
        }
        decide::order(&mut next, &self.context.node.name);
        // The next one is the last.
        next.reverse();
        goal.due = now;
        goal.phase = Phase::Ask(Box::new(Asking {
            id: self.ids.new_id(),
            since: now,
            next,
            asked: Vec::new(),
            crowded: 0,
            poll: 0,
        }));
        Ok(())
    }

    /// Asks another node, or looks whether one gave something.
    fn poll(
        &mut self,
        goal: &mut Goal,
        missing: u64,
        own: u128,
        now: Instant,
    ) -> Result<(), Fault> {
        let size = self.size(goal, missing, own);
        let Phase::Ask(asking) = &mut goal.phase else {
            return Ok(());
        };
        let age = now.saturating_duration_since(asking.since);
        if age >= WANT_LIMIT {
            let Phase::Ask(asking) = std::mem::replace(&mut goal.phase, Phase::Claim(0)) else {
                return Ok(());
            };
            self.withdraw(&asking);
            let why = format!(
                "{} is exhausted: the owners of {} parts were asked, and none has a free address",
                goal.range.subnet(),
                asking.asked.len()
            );
            goal.fail(FailureKind::Exhausted, &why, now);
            return Ok(());
        }
        let rounds = usize::try_from(age.as_secs() / ROUND.as_secs()).unwrap_or(0) + 1;
        if asking.asked.len() < MAX_ASKED * rounds
            && let Some(one) = asking.next.pop()
        {
            let want = Want {
                node: self.context.node.name.clone(),
                id: asking.id.clone(),
                size: if one.among.0 == one.among.1 { 1 } else { size },
                among: one.among,
            };
            return self.want(goal, one, want, now);
        }
        goal.due = now + self.pace().poll;
        let subnets: BTreeSet<IpNetwork> = asking.asked.iter().map(|one| one.subnet).collect();
        asking.poll += 1;
        let Some(subnet) = subnets.iter().nth(asking.poll % subnets.len().max(1)) else {
            // Nobody could be asked.
            asking.since = now.checked_sub(WANT_LIMIT).unwrap_or(now);
            return Ok(());
        };
        self.claim(goal, *subnet, missing, own, now).map(drop)
    }

    fn want(
        &mut self,
        goal: &mut Goal,
        one: Candidate,
        want: Want,
        now: Instant,
    ) -> Result<(), Fault> {
        let read = self.visit(one.subnet, Mode::Usual, now)?;
        let (part, id) = (one.part, want.id.clone());
        let made = change(&read.document, &Change::Want { part, want });
        let Phase::Ask(asking) = &mut goal.phase else {
            return Ok(());
        };
        if let Ok(Changed {
            document: Some(next),
            ..
        }) = made
        {
            match self.swap(&read, next, vec![id])? {
                Swapped::Won(_) => {
                    goal.lost = 0;
                    // Its node gives of all that it has there.
                    let of = |one: &Candidate| (one.node.clone(), one.subnet, one.among);
                    asking.next.retain(|other| of(other) != of(&one));
                    asking.asked.push(one);
                }
                Swapped::Lost => {
                    asking.next.push(one);
                    goal.due = now + decide::backoff(goal.lost, random64());
                    goal.lost += 1;
                }
                Swapped::Denied(why) => return Err(why),
            }
        } else if let Err(Refused::Crowded { .. }) = made {
            // Behind the others.
            asking.next.insert(0, one);
            asking.crowded += 1;
            goal.due = now + CROWDED_INTERVAL;
        }
        Ok(())
    }

    /// Asks no more. What is handed over nevertheless is given back when it is empty.
    pub(super) fn withdraw(&mut self, asking: &Asking) {
        let subnets: BTreeSet<IpNetwork> = asking.asked.iter().map(|one| one.subnet).collect();
        let ids = vec![asking.id.clone()];
        for subnet in subnets {
            // A want that stays ends by its owner's clock.
            let _ = self.edit(subnet, |_| Ok(vec![Change::Unwant { ids: ids.clone() }]));
        }
    }
}

fn held_text(range: IpNetwork, held: IpNetwork) -> String {
    format!(
        "{range}: no address is free while {held} is held for the leases of another program; import them, then \
         rdmactl addresses unhold {range}"
    )
}

/// Whether a part is the network of the node's own that a goal asks for.
fn is_network_of(goal: &Goal, piece: IpNetwork, part: &OwnedPart) -> bool {
    matches!(goal.room, Room::Network(of) if of.prefix == piece.prefix())
        && part.network.is_some()
        && goal.range.size_within(piece) > 0
}
