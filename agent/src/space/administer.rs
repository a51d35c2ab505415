//! An administrator's word about parts.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use ipam::leases::since_boot;
use ipam::owned;
use ipam::subnet::{Change, Document, OwnNetwork, Part, change, piece, subnet_of};
use ipnetwork::IpNetwork;
use node::random::random64;
use node_wire::{Failure, FailureKind, PartsChange, PartsChanged};

use super::{Fault, Space, Swapped};
use crate::decide::{self, Mode};
use crate::reserve::{self, Outcome, Reservation};

/// How often a change is tried.
const MAX_ATTEMPTS: usize = 16;

impl Space {
    /// Makes changes of a document, again where another node was faster.
    pub(super) fn edit(
        &mut self,
        subnet: IpNetwork,
        changes: impl Fn(&Document) -> Result<Vec<Change>, Failure>,
    ) -> Result<(), Failure> {
        let fault = |why: Fault| Failure::new(FailureKind::TryAgain, why);
        for attempt in 0..MAX_ATTEMPTS {
            let read = self
                .call(|backend| backend.read(&self.space, subnet))
                .map_err(fault)?;
            let mut next = read.document.clone();
            for one in changes(&read.document)? {
                let changed = change(&next, &one)
                    .map_err(|why| Failure::new(FailureKind::Mismatch, why.to_string()))?;
                next = changed.document.unwrap_or(next);
            }
            if next == read.document {
                return Ok(());
            }
            match self.swap(&read, next, Vec::new()).map_err(fault)? {
                Swapped::Won(_) => return Ok(()),
                Swapped::Denied(why) => return Err(Failure::new(FailureKind::Mismatch, why)),
                Swapped::Lost => {}
            }
            let wait = decide::backoff(0, random64()) / 8;
            std::thread::sleep(if attempt == 0 { Duration::ZERO } else { wait });
        }
        let why =
            format!("other nodes change the document of {subnet} at the same time; try again");
        Err(Failure::new(FailureKind::TryAgain, why))
    }

    pub(super) fn administer(
        &mut self,
        word: &PartsChange,
        now: Instant,
    ) -> Result<PartsChanged, Failure> {
        let fault = |why: Fault| Failure::new(FailureKind::TryAgain, why);
        let parse = |text: &str| {
            let piece = text.parse::<IpNetwork>().ok();
            let piece = piece.filter(|piece| piece::is_piece(subnet_of(piece.ip()), *piece));
            let why = format!("{text:?} is not a part of one subnet, as 10.56.3.16/28");
            piece.ok_or(Failure::new(FailureKind::Mismatch, why))
        };
        match word {
            PartsChange::GiveBack => self.leave(now).map_err(fault),
            PartsChange::ReleaseNode(node) if *node == self.context.node.name => {
                let why = "this is that node, and its agent runs: rdmactl addresses give-back, or release --part CIDR";
                Err(Failure::new(FailureKind::Mismatch, why))
            }
            PartsChange::ReleaseNode(node) => {
                let subnets = self
                    .call(|backend| backend.subnets(&self.space, node))
                    .map_err(fault)?;
                let mut changed = PartsChanged::default();
                for subnet in subnets {
                    self.release(subnet, &mut changed, |_, part| part.node == *node)?;
                }
                if changed.changed.is_empty() {
                    let why = format!(
                        "node {node} has no part in {}: see its name, and --network-name",
                        self.space
                    );
                    return Err(Failure::new(FailureKind::Mismatch, why));
                }
                Ok(changed)
            }
            PartsChange::ReleasePart(text) => {
                let piece = parse(text)?;
                self.disown(piece)?;
                let mut changed = PartsChanged::default();
                self.release(subnet_of(piece.ip()), &mut changed, |found, _| {
                    found == piece
                })?;
                if changed.changed.is_empty() {
                    let why = format!("{piece} is not a part: see the document of its subnet");
                    return Err(Failure::new(FailureKind::Mismatch, why));
                }
                Ok(changed)
            }
            PartsChange::Assign { node, .. } if !node::identity::is_name(node) => {
                let why = format!("{node:?} is not a node's name");
                Err(Failure::new(FailureKind::Mismatch, why))
            }
            PartsChange::Assign { part, node } => {
                let piece = parse(part)?;
                let part = Part {
                    node: node.clone(),
                    network: Some(OwnNetwork::default()),
                    ..Part::default()
                };
                let reserve = Change::Reserve { piece, part };
                self.edit(subnet_of(piece.ip()), |_| Ok(vec![reserve.clone()]))?;
                self.watched.insert(subnet_of(piece.ip()), now);
                Ok(PartsChanged {
                    changed: vec![piece.to_string()],
                    ..PartsChanged::default()
                })
            }
            // The agent asks for it one subnet at a time, so that ADDs do not wait.
            PartsChange::Hold(_) | PartsChange::Unhold(_) | PartsChange::Import { .. } => {
                Err(Failure::new(FailureKind::Other, "asked as a whole"))
            }
        }
    }

    /// Changes which addresses of a network in one subnet are reserved, in one compare-and-swap.
    pub(super) fn reserve(
        &mut self,
        network: IpNetwork,
        reservation: &Reservation,
    ) -> Result<Outcome, Failure> {
        let subnet = subnet_of(network.ip());
        if self.is_restored(subnet) {
            let why = format!(
                "the document of {subnet} is older than one that was read before, and nodes claim what they had \
                 anew: try again in 15 minutes"
            );
            return Err(Failure::new(FailureKind::TryAgain, why));
        }
        let is_watched = self.watched.contains_key(&subnet);
        let done = RefCell::new(Outcome::default());
        self.edit(subnet, |document| {
            let doubt = document.in_doubt();
            if !doubt.is_empty() {
                let why = format!("parts of the document of {subnet} overlap: {doubt:?}");
                return Err(Failure::new(FailureKind::Mismatch, why));
            }
            let outcome = reserve::decide(document, network, reservation);
            let changes = outcome.changes.clone();
            *done.borrow_mut() = outcome;
            Ok(changes)
        })?;
        if !is_watched {
            self.watched.remove(&subnet);
        }
        Ok(done.into_inner())
    }

    /// Gives back all that has no lease.
    fn leave(&mut self, now: Instant) -> Result<PartsChanged, Fault> {
        let before = self.owned()?;
        let subnets: BTreeSet<IpNetwork> = before
            .parts
            .keys()
            .map(|piece| subnet_of(piece.ip()))
            .collect();
        for subnet in subnets {
            let mut attempts = 0..MAX_ATTEMPTS;
            while !self.has_left(subnet, now)? {
                if attempts.next().is_none() {
                    return Err(format!(
                        "other nodes change the document of {subnet} at the same time; try again"
                    ));
                }
            }
        }
        let after = self.owned()?;
        let mut changed = PartsChanged::default();
        for piece in before.parts.keys() {
            match after.parts.get(piece) {
                None => changed.changed.push(piece.to_string()),
                Some(part) => {
                    let why = match part.network {
                        Some(_) => "it is this node's network",
                        None => "addresses of it are leased or cool down",
                    };
                    changed.kept.push((piece.to_string(), why.to_owned()));
                }
            }
        }
        Ok(changed)
    }

    /// Gives back what has no lease in a document; whether nothing of it is there still, because
    /// another node was faster.
    fn has_left(&mut self, subnet: IpNetwork, now: Instant) -> Result<bool, Fault> {
        let read = self.visit(subnet, Mode::Leave, now)?;
        let owned = self.owned()?.parts;
        let mut parts = read.document.parts.iter();
        Ok(parts.all(|(piece, part)| {
            part.node != self.context.node.name
                || part.over.is_some()
                || owned.keys().any(|own| piece::covers(*piece, *own))
        }))
    }

    /// Frees the parts of a document that an administrator means.
    fn release(
        &mut self,
        subnet: IpNetwork,
        changed: &mut PartsChanged,
        is_meant: impl Fn(IpNetwork, &Part) -> bool,
    ) -> Result<(), Failure> {
        let freed = RefCell::new(Vec::new());
        self.edit(subnet, |document| {
            let meant = document
                .parts
                .iter()
                .filter(|(piece, part)| is_meant(**piece, part));
            let changes: Vec<Change> = meant
                .map(|(piece, part)| Change::Unreserve {
                    piece: *piece,
                    part: part.clone(),
                })
                .collect();
            *freed.borrow_mut() = changes.iter().filter_map(piece_of).collect();
            Ok(changes)
        })?;
        changed
            .changed
            .extend(freed.into_inner().iter().map(ToString::to_string));
        Ok(())
    }

    /// Takes a part that an administrator releases out of the node's own file.
    fn disown(&self, piece: IpNetwork) -> Result<(), Failure> {
        let disowned = owned::change(
            &self.leases,
            &self.context.state_dir,
            &self.space,
            |owned, leased| -> Result<bool, Fault> {
                let uses = leased.of(piece).map_err(|error| error.to_string())?;
                let busy = decide::busy(&uses, since_boot(), self.context.cooldown);
                let of_it = |part: &IpNetwork| piece::covers(piece, *part);
                let is_free = busy.is_empty() || !owned.parts.keys().any(of_it);
                if is_free {
                    owned.parts.retain(|part, _| !of_it(part));
                }
                Ok(is_free)
            },
        );
        let fault = |why: Fault| Failure::new(FailureKind::TryAgain, why);
        let is_free = disowned
            .map_err(|error| fault(error.to_string()))?
            .map_err(fault)?;
        match is_free {
            true => Ok(()),
            false => {
                let why =
                    format!("{piece} is this node's, and addresses of it are leased or cool down");
                Err(Failure::new(FailureKind::Mismatch, why))
            }
        }
    }
}

fn piece_of(change: &Change) -> Option<IpNetwork> {
    match change {
        Change::Unreserve { piece, .. } => Some(*piece),
        _ => None,
    }
}
