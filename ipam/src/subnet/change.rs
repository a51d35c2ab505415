//! Every change of a document.
//!
//! A change whose answer was lost is made again as it was; the IDs in it say that it is done.

use super::{Document, MAX_WANTS, Over, OwnNetwork, Part, Want, piece};
use crate::range::{Range, gateway_in};
use crate::space::{longest, overlap};
use ipnetwork::IpNetwork;

/// A node, and the ID by which it has, or will have, a part.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Holder {
    pub node: String,
    pub id: String,
}

/// Which piece is claimed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wanted {
    /// A free piece with usable addresses of a range: of so many addresses, a power of two, or else of
    /// half as many, and so on.
    Size { size: u16, range: Range },
    /// This piece.
    Exact(IpNetwork),
    /// A network of the node's own of a range that is divided by `perNode`.
    Network(Range),
}

/// Pieces that their owner gives to the node that asked one of its parts, with those that it gave before
/// together at most as large as it asked.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Handover {
    pub pieces: Vec<IpNetwork>,
    pub want: Want,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// A free piece becomes the holder's.
    Claim { by: Holder, what: Wanted },
    /// Of what the holder has by its ID it keeps these pieces only.
    Give {
        by: Holder,
        keep: Vec<IpNetwork>,
        to: Option<Handover>,
    },
    /// Asks for a piece of another node's part.
    Want { part: IpNetwork, want: Want },
    /// These IDs ask no more.
    Unwant { ids: Vec<String> },
    /// The node of a part, which has it by this ID, is gone or has forgotten it.
    Over {
        part: IpNetwork,
        id: Option<String>,
        over: Over,
    },
    /// The part is this node's, says the node: it was marked, assigned, or is not in its file.
    NotOver {
        part: IpNetwork,
        was: Option<String>,
        by: Holder,
    },
    /// A part that is over becomes the holder's.
    Take {
        part: IpNetwork,
        id: Option<String>,
        by: Holder,
    },
    /// An administrator makes a free piece a part: a reserved one, or a node's without ID.
    Reserve { piece: IpNetwork, part: Part },
    /// An administrator frees a part, which was read so.
    Unreserve { piece: IpNetwork, part: Part },
}

/// What a change made of a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    /// The next document; `None` if it is as the change would have it.
    pub document: Option<Document>,
    /// The piece that was claimed, given, marked or taken.
    pub piece: Option<IpNetwork>,
}

/// Why a document is not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("{subnet} has no free piece with a usable address")]
    NoRoom { subnet: IpNetwork },
    #[error("{part} is a part of node {node}")]
    Held { part: IpNetwork, node: String },
    #[error("{part} is the network of node {node}")]
    Network { part: IpNetwork, node: String },
    #[error("{part} is reserved: {why}")]
    Reserved { part: IpNetwork, why: String },
    #[error("{MAX_WANTS} nodes ask for a piece of {part} already")]
    Crowded { part: IpNetwork },
    #[error("{part} changed meanwhile")]
    Stale { part: IpNetwork },
    #[error("{piece} is not a piece of {subnet}")]
    NotAPiece { subnet: IpNetwork, piece: IpNetwork },
}

/// Makes a change.
///
/// # Errors
/// [`Refused`]; the document stays as it is.
pub fn change(document: &Document, change: &Change) -> Result<Changed, Refused> {
    match change {
        Change::Claim { by, what } => claim(document, by, what),
        Change::Give { by, keep, to } => give(document, by, keep, to.as_ref()),
        Change::Want { part, want } => ask(document, *part, want),
        Change::Unwant { ids } => {
            let mut next = document.clone();
            withdraw(&mut next, |want| ids.contains(&want.id));
            Ok(changed(document, next, None))
        }
        Change::Over { part, id, over } => mark(document, *part, id.as_ref(), over),
        Change::NotOver { part, was, by } => {
            if let Some(done) = done(document, by)? {
                return Ok(done);
            }
            let mut next = document.clone();
            let found = found(&mut next, *part, was.as_ref())?;
            if found.node != by.node {
                return Err(refuse(document, *part));
            }
            (found.id, found.over) = (Some(by.id.clone()), None);
            Ok(changed(document, next, Some(*part)))
        }
        Change::Take { part, id, by } => {
            if let Some(done) = done(document, by)? {
                return Ok(done);
            }
            let mut next = document.clone();
            let found = found(&mut next, *part, id.as_ref())?;
            if found.over.is_none() || found.network.is_some() {
                return Err(refuse(document, *part));
            }
            *found = Part::of(by);
            Ok(changed(document, next, Some(*part)))
        }
        Change::Reserve { piece, part } => {
            if document.parts.get(piece) == Some(part) {
                return Ok(changed(document, document.clone(), Some(*piece)));
            }
            insert(document, *piece, part.clone())
        }
        Change::Unreserve { piece, part } => match document.parts.get(piece) {
            Some(found) if found != part => Err(Refused::Stale { part: *piece }),
            _ => {
                let mut next = document.clone();
                next.parts.remove(piece);
                Ok(changed(document, next, Some(*piece)))
            }
        },
    }
}

fn changed(before: &Document, next: Document, piece: Option<IpNetwork>) -> Changed {
    let document = (next != *before).then_some(next);
    Changed { document, piece }
}

/// The answer if the holder has a part by its new ID. One that is marked meanwhile is not done.
fn done(document: &Document, by: &Holder) -> Result<Option<Changed>, Refused> {
    let Some((piece, part)) = document.by_id(&by.id) else {
        return Ok(None);
    };
    match part.node == by.node && part.over.is_none() {
        true => Ok(Some(Changed {
            document: None,
            piece: Some(piece),
        })),
        false => Err(Refused::Stale { part: piece }),
    }
}

/// A part as it was read: by its ID.
fn found<'d>(
    document: &'d mut Document,
    part: IpNetwork,
    id: Option<&String>,
) -> Result<&'d mut Part, Refused> {
    let found = document.parts.get_mut(&part);
    let found = found.filter(|found| found.id.as_ref() == id && found.reserved.is_none());
    found.ok_or(Refused::Stale { part })
}

/// Whose a part is.
fn refuse(document: &Document, piece: IpNetwork) -> Refused {
    let mut parts = document.parts.iter();
    let Some((part, found)) = parts.find(|(part, _)| overlap(**part, piece)) else {
        return Refused::Stale { part: piece };
    };
    let (part, node) = (*part, found.node.clone());
    match (&found.reserved, &found.network) {
        (Some(why), _) => Refused::Reserved {
            part,
            why: why.clone(),
        },
        (None, Some(_)) => Refused::Network { part, node },
        (None, None) => Refused::Held { part, node },
    }
}

fn insert(document: &Document, piece: IpNetwork, part: Part) -> Result<Changed, Refused> {
    let subnet = document.subnet;
    if !piece::is_piece(subnet, piece) {
        return Err(Refused::NotAPiece { subnet, piece });
    }
    if document.parts.keys().any(|other| overlap(*other, piece)) {
        return Err(refuse(document, piece));
    }
    let mut next = document.clone();
    // Who has a piece asks for no other by its ID.
    withdraw(&mut next, |want| Some(&want.id) == part.id.as_ref());
    next.parts.insert(piece, part);
    Ok(changed(document, next, Some(piece)))
}

fn claim(document: &Document, by: &Holder, what: &Wanted) -> Result<Changed, Refused> {
    if let Some(done) = done(document, by)? {
        return Ok(done);
    }
    let no_room = Refused::NoRoom {
        subnet: document.subnet,
    };
    let mut part = Part::of(by);
    let piece = match what {
        Wanted::Exact(piece) => *piece,
        Wanted::Size { size, range } => {
            let halves = (0..=size.max(&1).ilog2()).rev().map(|bits| 1 << bits);
            let mut free = halves.filter_map(|size| piece::free(document, size, range));
            free.next().ok_or(no_room)?
        }
        Wanted::Network(range) => {
            let per_node = range.per_node().ok_or(no_room.clone())?;
            let v4 = document.subnet.is_ipv4();
            let bits = longest(v4)
                .checked_sub(per_node.prefix)
                .filter(|bits| *bits <= 8);
            let size = 1 << bits.ok_or(no_room.clone())?;
            let piece = piece::free(document, size, range).ok_or(no_room)?;
            let gateway = gateway_in(per_node, piece);
            part.network = Some(OwnNetwork { gateway });
            piece
        }
    };
    insert(document, piece, part)
}

fn give(
    document: &Document,
    by: &Holder,
    keep: &[IpNetwork],
    to: Option<&Handover>,
) -> Result<Changed, Refused> {
    let mine = document.pieces_of(by);
    let is_mine = |piece: &IpNetwork| mine.iter().any(|whole| piece::covers(*whole, *piece));
    let handed = to.map(|to| to.pieces.as_slice()).unwrap_or_default();
    let all = || keep.iter().chain(handed);
    if let Some(lost) = keep.iter().find(|piece| !is_mine(piece)) {
        return Err(Refused::Stale { part: *lost });
    }
    let clashes = |(at, piece): (usize, &IpNetwork)| {
        let mut before = all().take(at);
        !piece::is_piece(document.subnet, *piece) || before.any(|other| overlap(*other, *piece))
    };
    if let Some((_, piece)) = all().enumerate().find(|one| clashes(*one)) {
        return Err(Refused::NotAPiece {
            subnet: document.subnet,
            piece: *piece,
        });
    }
    let mut next = document.clone();
    let parts: Vec<(IpNetwork, Part)> = mine
        .iter()
        .filter_map(|piece| Some((*piece, next.parts.remove(piece)?)))
        .collect();
    // All have one ID, and are marked together or not at all that matters: a mark stays.
    let mut left = parts
        .first()
        .map(|(_, part)| part.clone())
        .unwrap_or_default();
    left.over = parts.iter().find_map(|(_, part)| part.over.clone());
    left.wanted = Vec::new();
    for piece in keep {
        next.parts.insert(*piece, left.clone());
    }
    if let Some(Handover { pieces, want }) = to {
        let holder = Holder {
            node: want.node.clone(),
            id: want.id.clone(),
        };
        let has = document.pieces_of(&holder);
        // It was asked by any part of its node; who has a piece of it already has asked.
        let mut parts = document.parts.values();
        let is_asked =
            !has.is_empty() || parts.any(|part| part.node == by.node && part.wanted.contains(want));
        let is_done = !has.is_empty() && !pieces.iter().any(is_mine);
        let size = has.iter().chain(pieces).map(|piece| piece::size(*piece));
        let size: usize = size.sum();
        if !is_done {
            if !is_asked || !pieces.iter().all(is_mine) || size > want.size.into() {
                let part = handed.first().copied().unwrap_or(document.subnet);
                return Err(Refused::Stale { part });
            }
            let pieces = pieces.iter().map(|piece| (*piece, Part::of(&holder)));
            next.parts.extend(pieces);
        }
        withdraw(&mut next, |other| other.id == want.id);
    }
    let served = to.map(|to| &to.want.id);
    for (piece, part) in parts {
        for want in part.wanted {
            if Some(&want.id) != served {
                move_want(&mut next, by, piece, want);
            }
        }
    }
    Ok(changed(document, next, handed.first().copied()))
}

/// Puts a want on what is kept of the part where it stood, else on another part of its node; it ends where
/// there is none.
fn move_want(document: &mut Document, by: &Holder, stood: IpNetwork, want: Want) {
    let mut parts: Vec<(&IpNetwork, &mut Part)> = document
        .parts
        .iter_mut()
        .filter(|(_, part)| {
            let is_its = part.id.as_ref() == Some(&by.id) || part.over.is_none();
            let can_give = part.network.is_none() && part.reserved.is_none() && is_its;
            part.node == by.node && can_give && part.wanted.len() < MAX_WANTS
        })
        .collect();
    parts.sort_by_key(|(piece, _)| (piece::covers(stood, **piece), piece::size(**piece)));
    if let Some((_, part)) = parts.pop()
        && !part.wanted.contains(&want)
    {
        part.wanted.push(want);
    }
}

fn ask(document: &Document, part: IpNetwork, want: &Want) -> Result<Changed, Refused> {
    if document.by_id(&want.id).is_some() {
        return Ok(changed(document, document.clone(), Some(part)));
    }
    let mut next = document.clone();
    let found = next.parts.get_mut(&part).ok_or(Refused::Stale { part })?;
    if found.reserved.is_some() || found.network.is_some() || found.node == want.node {
        return Err(refuse(document, part));
    }
    // It asks anew, behind the others.
    found
        .wanted
        .retain(|other| other.node != want.node || other.among != want.among || other == want);
    if !found.wanted.contains(want) {
        if found.wanted.len() >= MAX_WANTS {
            return Err(Refused::Crowded { part });
        }
        found.wanted.push(want.clone());
    }
    Ok(changed(document, next, Some(part)))
}

fn mark(
    document: &Document,
    part: IpNetwork,
    id: Option<&String>,
    over: &Over,
) -> Result<Changed, Refused> {
    let mut next = document.clone();
    let found = found(&mut next, part, id)?;
    if found.network.is_some() {
        return Err(refuse(document, part));
    }
    found.over.get_or_insert_with(|| over.clone());
    Ok(changed(document, next, Some(part)))
}

fn withdraw(document: &mut Document, ends: impl Fn(&Want) -> bool) {
    for part in document.parts.values_mut() {
        part.wanted.retain(|want| !ends(want));
    }
}
