//! What an agent does about a document that was read, decided on plain data: no file, socket or clock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use ipam::leases::Use;
use ipam::owned::{Owned, OwnedNetwork, OwnedPart};
use ipam::range::{Range, Span, bits};
use ipam::space::{hash, overlap};
use ipam::subnet::{Change, Document, Handover, Holder, Over, Part, Want, Wanted, piece};
use ipnetwork::IpNetwork;

/// How long a part is empty before it is given back.
pub const EMPTY_REST: Duration = Duration::from_mins(10);
/// How long a part that this node has forgotten is marked before it is given back.
pub const FORGOTTEN_REST: Duration = Duration::from_mins(5);
/// How long a want stands.
pub const WANT_LIMIT: Duration = Duration::from_mins(2);
/// For how long what came is for the ADD that waited for it.
pub const NEW_REST: Duration = Duration::from_secs(1);
/// How many parts are asked for room at once.
pub const MAX_ASKED: usize = 8;
/// The shortest and the longest time for which a range without room is not claimed from.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// The longest time before a lost compare-and-swap is tried again.
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// This node, in this boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThisNode {
    pub name: String,
    pub boot: String,
}

/// IDs for claims that no other disk and no earlier claim has.
#[derive(Debug, Clone)]
pub struct Ids {
    /// With what those of this disk begin.
    pub claimant: String,
    /// A random number, counted up.
    pub next: u32,
}

impl Ids {
    pub fn new_id(&mut self) -> String {
        self.next = self.next.wrapping_add(1);
        format!("{}-{:08x}", self.claimant, self.next)
    }
}

/// Since when something is as it is, by the monotonic clock.
#[derive(Debug, Default)]
pub struct History {
    empty: BTreeMap<IpNetwork, Instant>,
    wants: BTreeMap<String, Instant>,
    /// By their IDs, since when parts are this node's.
    had: BTreeMap<String, Instant>,
    forgotten: BTreeMap<(IpNetwork, Option<String>), Instant>,
}

/// What is known when a document was read.
#[derive(Debug)]
pub struct Inputs<'a> {
    pub node: &'a ThisNode,
    pub document: &'a Document,
    pub owned: &'a Owned,
    /// Addresses of the subnet that are leased or cool down.
    pub busy: &'a BTreeMap<IpAddr, Busy>,
    /// IDs for which this process has asked.
    pub pending: &'a BTreeSet<String>,
    /// Ranges from which pods of this node have addresses, or were asked for lately.
    pub in_use: &'a [Range],
    pub now: Instant,
    /// For people, in a mark.
    pub time: &'a str,
    pub mode: Mode,
}

/// What may be done with a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Usual,
    /// Empty parts are given back at once: the node leaves.
    Leave,
    /// The document is older than one that was read before.
    Restored,
}

/// Why an address cannot be given away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Busy {
    Leased,
    CoolingDown,
}

/// What follows from a document.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// What the node owns of the subnet from now on.
    pub parts: BTreeMap<IpNetwork, OwnedPart>,
    /// To be made of the document, in this order.
    pub changes: Vec<Change>,
    /// Whether something in the document is about this node.
    pub is_watched: bool,
    /// Whether somebody asks this node for room.
    pub is_asked: bool,
    /// Whether no piece is free, so that others will ask.
    pub is_full: bool,
    /// Whether another node has to let go first: it is read again soon.
    pub is_unsettled: bool,
}

/// Addresses that are leased or cool down, when the boot is so old.
#[must_use]
pub fn busy(uses: &[(IpAddr, Use)], age: Duration, cooldown: Duration) -> BTreeMap<IpAddr, Busy> {
    let busy = uses.iter().filter_map(|(address, used)| match used {
        Use::Leased => Some((*address, Busy::Leased)),
        Use::Freed(at) if *at + cooldown > age => Some((*address, Busy::CoolingDown)),
        Use::Freed(_) => None,
    });
    busy.collect()
}

/// Decides about a document.
pub fn decide(inputs: &Inputs<'_>, history: &mut History, ids: &mut Ids) -> Decision {
    let mut decision = Decision::default();
    if inputs.mode == Mode::Restored {
        restore(inputs, &mut decision);
        return decision;
    }
    let doubt = inputs.document.in_doubt();
    let mine = inputs.document.parts.iter();
    let mine = mine.filter(|(piece, part)| part.node == inputs.node.name && !doubt.contains(piece));
    let mut given = BTreeSet::new();
    for (piece, part) in mine {
        decision.is_watched = true;
        if let Some(id) = settle(inputs, history, ids, *piece, part, &mut decision) {
            given.insert(id);
        }
    }
    history.forgotten.retain(|(piece, _), _| {
        !in_subnet(inputs, *piece) || inputs.document.parts.contains_key(piece)
    });
    // What overlaps is not leased from, and pods can have addresses of it: what has one ID with it stays.
    let in_doubt = inputs.document.parts.iter();
    let in_doubt = in_doubt.filter(|(piece, _)| doubt.contains(piece));
    let in_doubt = in_doubt.filter_map(|(_, part)| part.id.clone()).collect();
    give_empty(inputs, history, &mut decision, &in_doubt);
    hand_over(inputs, history, &mut decision, given, &in_doubt);
    claim_leased(inputs, ids, &mut decision);
    let is_full = |range: &Range| {
        range.size_within(inputs.document.subnet) > 0
            && piece::free(inputs.document, 1, range).is_none()
    };
    decision.is_full = decision.is_watched && inputs.in_use.iter().any(is_full);
    let wanted = |part: &Part| {
        part.wanted
            .iter()
            .any(|want| inputs.pending.contains(&want.id))
    };
    decision.is_watched |= inputs.document.parts.values().any(wanted);
    decision
}

fn in_subnet(inputs: &Inputs<'_>, piece: IpNetwork) -> bool {
    piece::is_piece(inputs.document.subnet, piece)
}

fn owned_of<'a>(inputs: &'a Inputs<'_>) -> impl Iterator<Item = (IpNetwork, &'a OwnedPart)> {
    let parts = inputs.owned.parts.iter();
    parts
        .filter(|(piece, _)| in_subnet(inputs, **piece))
        .map(|(piece, part)| (*piece, part))
}

/// One part that names this node: owned, to be owned, or to go. Returns an ID that goes.
fn settle(
    inputs: &Inputs<'_>,
    history: &mut History,
    ids: &mut Ids,
    whole: IpNetwork,
    part: &Part,
    decision: &mut Decision,
) -> Option<String> {
    let boot = &inputs.node.boot;
    let held: Vec<(IpNetwork, OwnedPart)> = owned_of(inputs)
        .filter(|(piece, own)| Some(&own.id) == part.id.as_ref() && piece::covers(whole, *piece))
        .map(|(piece, own)| {
            let boot = boot.clone();
            (
                piece,
                OwnedPart {
                    boot,
                    ..own.clone()
                },
            )
        })
        .collect();
    let mut busy = inputs.busy.iter();
    let is_leased = busy.any(|(address, busy)| *busy == Busy::Leased && whole.contains(*address));
    let is_pending = part
        .id
        .as_ref()
        .is_some_and(|id| inputs.pending.contains(id));
    let is_marked = part.over.is_some();
    if !is_marked && !held.is_empty() {
        decision.parts.extend(held);
        return None;
    }
    if let (Some(id), false, true) = (&part.id, is_marked, is_pending) {
        let network = part.network.as_ref().map(|network| OwnedNetwork {
            gateway: network.gateway,
        });
        let own = OwnedPart {
            id: id.clone(),
            boot: boot.clone(),
            network,
        };
        decision.parts.insert(whole, own);
        return None;
    }
    // It is this node's, and only its own compare-and-swap says so.
    if !held.is_empty() || is_pending || is_leased || part.network.is_some() || part.id.is_none() {
        let by = Holder {
            node: inputs.node.name.clone(),
            id: ids.new_id(),
        };
        decision.changes.push(Change::NotOver {
            part: whole,
            was: part.id.clone(),
            by,
        });
        return None;
    }
    let id = part.id.clone()?;
    // A claim or a give-back of this disk that did not end.
    if !is_marked
        && id
            .split_once('-')
            .is_some_and(|(claimant, _)| claimant == ids.claimant)
    {
        return Some(id);
    }
    if is_marked {
        let key = (whole, part.id.clone());
        let since = *history.forgotten.entry(key).or_insert(inputs.now);
        return (inputs.now.saturating_duration_since(since) >= FORGOTTEN_REST).then_some(id);
    }
    decision.changes.push(Change::Over {
        part: whole,
        id: Some(id),
        over: Over {
            since: inputs.time.to_owned(),
            why: format!("forgotten by {}", inputs.node.name),
        },
    });
    None
}

/// Claims what pods of this node have and nobody owns: leased while the node had its addresses alone.
fn claim_leased(inputs: &Inputs<'_>, ids: &mut Ids, decision: &mut Decision) {
    let is_claimable = |address: IpAddr| {
        let mut parts = inputs.document.parts.keys();
        inputs.busy.get(&address) == Some(&Busy::Leased)
            && !parts.any(|part| part.contains(address))
    };
    for piece in piece::cover(inputs.document.subnet, &is_claimable) {
        let by = Holder {
            node: inputs.node.name.clone(),
            id: ids.new_id(),
        };
        let what = Wanted::Exact(piece);
        decision.changes.push(Change::Claim { by, what });
    }
}

/// Lets empty parts go that the node does not need.
fn give_empty(
    inputs: &Inputs<'_>,
    history: &mut History,
    decision: &mut Decision,
    in_doubt: &BTreeSet<String>,
) {
    let is_busy = |piece: IpNetwork| inputs.busy.keys().any(|address| piece.contains(*address));
    let owned: Vec<IpNetwork> = decision.parts.keys().copied().collect();
    history.empty.retain(|piece, _| {
        !in_subnet(inputs, *piece) || (owned.contains(piece) && !is_busy(*piece))
    });
    for piece in owned {
        let stays = decision
            .parts
            .get(&piece)
            .is_some_and(|part| part.network.is_some() || in_doubt.contains(&part.id));
        if stays || is_busy(piece) {
            continue;
        }
        let since = *history.empty.entry(piece).or_insert(inputs.now);
        let goes = match inputs.mode {
            Mode::Leave => true,
            _ => {
                let elsewhere = inputs
                    .owned
                    .parts
                    .keys()
                    .filter(|other| !in_subnet(inputs, **other));
                let others: Vec<IpNetwork> = elsewhere
                    .chain(decision.parts.keys().filter(|other| **other != piece))
                    .copied()
                    .collect();
                let has = |range: &Range, piece| range.size_within(piece) > 0;
                let mut needs = inputs.in_use.iter().filter(|range| has(range, piece));
                inputs.now.saturating_duration_since(since) >= EMPTY_REST
                    && needs.all(|range| others.iter().any(|other| has(range, *other)))
            }
        };
        if goes {
            decision.parts.remove(&piece);
        }
    }
}

/// Gives pieces to nodes that ask for them, and what is not owned any more back.
fn hand_over(
    inputs: &Inputs<'_>,
    history: &mut History,
    decision: &mut Decision,
    mut given: BTreeSet<String>,
    in_doubt: &BTreeSet<String>,
) {
    let mine = inputs.document.parts.values();
    let mine = mine.filter(|part| part.node == inputs.node.name && part.over.is_none());
    let mine: Vec<&Part> = mine.collect();
    let (mut stale, mut wants) = (Vec::new(), Vec::<&Want>::new());
    for want in mine.iter().flat_map(|part| &part.wanted) {
        let since = *history.wants.entry(want.id.clone()).or_insert(inputs.now);
        if inputs.now.saturating_duration_since(since) >= WANT_LIMIT {
            stale.push(want.id.clone());
        } else if !wants.contains(&want) {
            wants.push(want);
        }
    }
    decision.is_asked = !wants.is_empty();
    let known: BTreeSet<&String> = (inputs.owned.parts.values())
        .chain(decision.parts.values())
        .map(|own| &own.id)
        .collect();
    history.had.retain(|id, _| known.contains(id));
    for id in known {
        history.had.entry(id.clone()).or_insert(inputs.now);
    }
    let stays = |own: &OwnedPart| {
        let since = history.had.get(&own.id);
        since.is_none_or(|since| inputs.now.saturating_duration_since(*since) < NEW_REST)
            || own.network.is_some()
            || in_doubt.contains(&own.id)
    };
    let mut served = BTreeSet::new();
    let mut handovers: BTreeMap<String, Vec<Handover>> = BTreeMap::new();
    for want in wants {
        // Who asks names each run of its range by one ID.
        if served.contains(&want.id) {
            continue;
        }
        for (id, pieces) in pieces_for(want, &mut decision.parts, inputs.busy, &stays) {
            served.insert(&want.id);
            let want = want.clone();
            let of_id = handovers.entry(id).or_default();
            of_id.push(Handover { pieces, want });
        }
    }
    for id in mine.iter().filter_map(|part| part.id.as_ref()) {
        let kept = decision.parts.iter().filter(|(_, own)| own.id == *id);
        let kept: usize = kept.map(|(piece, _)| piece::size(*piece)).sum();
        let by = Holder {
            node: inputs.node.name.clone(),
            id: id.clone(),
        };
        let pieces = inputs.document.pieces_of(&by);
        let has: usize = pieces.iter().map(|piece| piece::size(*piece)).sum();
        let was_owned = owned_of(inputs).any(|(_, own)| own.id == *id);
        if was_owned && kept < has {
            given.insert(id.clone());
        }
    }
    given.retain(|id| !in_doubt.contains(id));
    let all = inputs.document.parts.values();
    let stands: BTreeSet<&String> = all
        .flat_map(|part| &part.wanted)
        .map(|want| &want.id)
        .collect();
    // IDs of other documents are not told from those that ended; they begin anew, at most twice as long.
    history.wants.retain(|id, since| {
        stands.contains(id) || inputs.now.saturating_duration_since(*since) < 2 * WANT_LIMIT
    });
    if !stale.is_empty() {
        decision.changes.push(Change::Unwant { ids: stale });
    }
    for id in given {
        let kept = decision.parts.iter().filter(|(_, own)| own.id == id);
        let kept: Vec<IpNetwork> = kept.map(|(piece, _)| *piece).collect();
        let by = Holder {
            node: inputs.node.name.clone(),
            id: id.clone(),
        };
        let mut to = handovers.remove(&id).unwrap_or_default();
        loop {
            let next = (!to.is_empty()).then(|| to.remove(0));
            let later = to.iter().flat_map(|later| &later.pieces);
            decision.changes.push(Change::Give {
                by: by.clone(),
                keep: kept.iter().chain(later).copied().collect(),
                to: next,
            });
            if to.is_empty() {
                break;
            }
        }
    }
}

/// The pieces for who asks, by the ID that the node has them by, cut out of what it owns: as large ones as
/// there are without an address in use, until it has what it asked for or half of what is free.
fn pieces_for(
    want: &Want,
    own: &mut BTreeMap<IpNetwork, OwnedPart>,
    busy: &BTreeMap<IpAddr, Busy>,
    stays: &dyn Fn(&OwnedPart) -> bool,
) -> BTreeMap<String, Vec<IpNetwork>> {
    let can_give = |(piece, own): &(&IpNetwork, &OwnedPart)| helps(want, **piece) && !stays(own);
    let size: usize = own
        .iter()
        .filter(can_give)
        .map(|(piece, _)| piece::size(*piece))
        .sum();
    let is_own = |address: &&IpAddr| {
        let mut own = own.iter().filter(can_give);
        own.any(|(piece, _)| piece.contains(**address))
    };
    let free = size.saturating_sub(busy.keys().filter(is_own).count());
    let (mut pieces, mut given) = (BTreeMap::<String, Vec<IpNetwork>>::new(), 0);
    loop {
        let missing = usize::from(want.size.max(1)).saturating_sub(given);
        let found = own.iter().filter(can_give);
        let found = found.filter_map(|(of, _)| Some((*of, piece_for(want, *of, missing, busy)?)));
        let largest = found.max_by_key(|(_, piece)| piece::size(*piece));
        let largest = largest.filter(|_| given == 0 || 2 * given < free);
        let Some((of, piece)) = largest else {
            return pieces;
        };
        let Some(part) = own.remove(&of) else {
            return pieces;
        };
        let rest = piece::cover(of, &|address| !piece.contains(address));
        own.extend(rest.into_iter().map(|rest| (rest, part.clone())));
        given += piece::size(piece);
        pieces.entry(part.id).or_default().push(piece);
    }
}

/// Whether a piece has addresses that who asks can use.
fn helps(want: &Want, piece: IpNetwork) -> bool {
    let (first, last) = (bits(want.among.0), bits(want.among.1));
    bits(piece.network()) <= last && first <= bits(piece.broadcast())
}

/// The largest piece of one that the node owns, without an address in use, that helps who asks.
fn piece_for(
    want: &Want,
    of: IpNetwork,
    missing: usize,
    busy: &BTreeMap<IpAddr, Busy>,
) -> Option<IpNetwork> {
    let most = piece::size(of).min(missing);
    let sizes = (0..=most.checked_ilog2()?).rev().map(|bits| 1 << bits);
    let fits = |piece: &IpNetwork| {
        helps(want, *piece) && !busy.keys().any(|address| piece.contains(*address))
    };
    sizes
        .filter_map(|size| piece::pieces(of, size).find(fits))
        .next()
}

/// A document that is older than one that was read: the node keeps what it has, and says so.
fn restore(inputs: &Inputs<'_>, decision: &mut Decision) {
    decision.is_watched = true;
    for (piece, own) in owned_of(inputs) {
        let by = Holder {
            node: inputs.node.name.clone(),
            id: own.id.clone(),
        };
        if inputs.document.confirms(&by, piece) {
            let boot = inputs.node.boot.clone();
            decision.parts.insert(
                piece,
                OwnedPart {
                    boot,
                    ..own.clone()
                },
            );
            continue;
        }
        // Not leased from until it is this node's again.
        let boot = String::new();
        let unconfirmed = OwnedPart {
            boot,
            ..own.clone()
        };
        decision.parts.insert(piece, unconfirmed);
        let mut others = inputs.document.parts.keys();
        if others.any(|other| overlap(*other, piece)) {
            decision.is_unsettled = true;
        } else {
            let what = Wanted::Exact(piece);
            decision.changes.push(Change::Claim { by, what });
        }
    }
    // What this node has given away since, its next owner gets while nobody claims anything new.
    for (piece, part) in &inputs.document.parts {
        let Some(id) = &part.id else { continue };
        let is_own = owned_of(inputs).any(|(_, own)| own.id == *id);
        let is_leased =
            |(address, busy): (&IpAddr, &Busy)| *busy == Busy::Leased && piece.contains(*address);
        let has_lease = inputs.busy.iter().any(is_leased);
        if part.node == inputs.node.name && part.network.is_none() && !is_own && !has_lease {
            let by = Holder {
                node: part.node.clone(),
                id: id.clone(),
            };
            decision.changes.push(Change::Give {
                by,
                keep: Vec::new(),
                to: None,
            });
        }
    }
}

/// How many addresses of a range can be leased from what is owned of it.
#[must_use]
pub fn free(of: &Range, busy: &BTreeMap<IpAddr, Busy>) -> u64 {
    let busy = busy.keys().filter(|address| of.gives(**address)).count();
    u64::try_from(of.size())
        .unwrap_or(u64::MAX)
        .saturating_sub(busy as u64)
}

/// A part of another node that can be asked for room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub subnet: IpNetwork,
    pub part: IpNetwork,
    pub node: String,
    /// First and last address of a run of the range that reaches into the part. Its node may give of all
    /// that it has there.
    pub among: (IpAddr, IpAddr),
}

/// The parts of a document that can be asked for room of a range.
#[must_use]
pub fn candidates(document: &Document, node: &str, range: &Range) -> Vec<Candidate> {
    let v4 = document.subnet.is_ipv4();
    let can_give = |part: &&Part| {
        part.reserved.is_none()
            && part.network.is_none()
            && part.over.is_none()
            && part.node != node
    };
    let parts = document.parts.iter().filter(|(_, part)| can_give(part));
    let whole = range.within(&[document.subnet]);
    let of_part = |(piece, part): (&IpNetwork, &Part)| {
        let is_in = |span: &&Span| {
            span.first <= bits(piece.broadcast()) && bits(piece.network()) <= span.last
        };
        let candidate = |run: &Span| Candidate {
            subnet: document.subnet,
            part: *piece,
            node: part.node.clone(),
            among: run.addresses(v4),
        };
        let runs = whole.spans().iter().filter(is_in);
        runs.map(candidate).collect::<Vec<Candidate>>()
    };
    parts.flat_map(of_part).collect()
}

/// In which order a node asks: one part of each node first, since one that has many may have no free address
/// at all; the larger part first, then each node in an order of its own.
pub fn order(candidates: &mut [Candidate], node: &str) {
    candidates.sort_by_cached_key(|one| {
        let size = piece::size(one.part);
        (usize::MAX - size, hash(&format!("{node} {}", one.part)))
    });
    let mut parts: BTreeMap<String, usize> = BTreeMap::new();
    candidates.sort_by_cached_key(|one| {
        let number = parts.entry(one.node.clone()).or_default();
        *number += 1;
        *number
    });
}

/// For how long a range is not claimed from after so many failures.
#[must_use]
pub fn pause(failures: u32) -> Duration {
    let (shortest, longest) = PAUSES;
    let length = shortest.saturating_mul(1 << failures.saturating_sub(1).min(16));
    length.min(longest)
}

/// When a compare-and-swap that lost so often is tried again, by a random number.
#[must_use]
pub fn backoff(lost: u32, random: u64) -> Duration {
    let most = Duration::from_secs(1)
        .saturating_mul(1 << lost.min(8))
        .min(MAX_BACKOFF);
    let most = u64::try_from(most.as_millis()).unwrap_or(1).max(1);
    Duration::from_millis(random % most)
}

#[cfg(test)]
mod tests;
