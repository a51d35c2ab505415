//! Every order of two nodes' changes of one document, with answers that are lost, compare-and-swaps
//! that arrive late and nodes that die: no address is leasable on both.

use super::tests::{claim, empty, holder, over, range, want};
use super::*;
use std::collections::HashSet;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Op {
    Claim(u16),
    /// All of one part.
    Give,
    /// One half of a part goes, to who asks first.
    Cut,
    Want,
    Over,
    /// Only of a node that is dead.
    Take,
    NotOver,
}

/// A compare-and-swap under way: the next document; `None` if another one won meanwhile.
type Swap = Option<Document>;

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Node {
    name: &'static str,
    at: usize,
    /// The change of the present step, chosen at its first read.
    change: Option<(Option<Holder>, Told)>,
    /// Awaited, and one that nobody awaits any more.
    awaited: Option<Swap>,
    late: Option<Swap>,
    /// The file `owned`; what is leasable while the node is alive.
    owned: BTreeMap<IpNetwork, String>,
    /// IDs that it asks for in this boot.
    pending: BTreeSet<String>,
    dead: bool,
    lost: u8,
    deaths: u8,
}

/// A change without the range, which has no hash.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Told {
    Claim(u16, String),
    Give(Holder, Vec<IpNetwork>, Option<Handover>),
    Want(IpNetwork, Want),
    Over(IpNetwork, Option<String>),
    Take(IpNetwork, Option<String>, Holder),
    NotOver(IpNetwork, Option<String>, Holder),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    document: Document,
    nodes: [Node; 2],
    /// A broken rule: what is given leaves the file behind the compare-and-swap.
    gives_late: bool,
}

fn told(node: &str, told: &Told) -> Change {
    match told.clone() {
        Told::Claim(size, id) => claim(node, &id, size, &range("10.56.3.1-10.56.3.2/24")),
        Told::Give(by, keep, to) => Change::Give { by, keep, to },
        Told::Want(part, want) => Change::Want { part, want },
        Told::Over(part, id) => Change::Over {
            part,
            id,
            over: over(),
        },
        Told::Take(part, id, by) => Change::Take { part, id, by },
        Told::NotOver(part, was, by) => Change::NotOver { part, was, by },
    }
}

impl World {
    fn choose(&self, me: usize, op: Op) -> Option<(Option<Holder>, Told)> {
        let node = &self.nodes[me];
        let new = holder(
            node.name,
            &format!("{}{}{}", node.name, node.at, node.deaths),
        );
        let theirs = |part: &Part| part.node != node.name;
        let mut parts = self.document.parts.iter();
        let (by, told) = match op {
            Op::Claim(size) => (Some(new.clone()), Told::Claim(size, new.id)),
            Op::Give | Op::Cut => {
                let (piece, id) = node.owned.first_key_value()?;
                let mine = holder(node.name, id);
                let whole = self.document.pieces_of(&mine);
                let part = whole.iter().find(|whole| piece::covers(**whole, *piece))?;
                let want = self.document.parts[part].wanted.first();
                let mut halves = piece::pieces(*piece, piece::size(*piece).div_ceil(2));
                let gone = halves.next()?;
                let rest = halves.next().filter(|_| op == Op::Cut);
                let of_id = node
                    .owned
                    .iter()
                    .filter(|(other, of)| *of == id && *other != piece);
                let keep = of_id.map(|(other, _)| *other).chain(rest).collect();
                let to = want.filter(|_| op == Op::Cut).map(|want| Handover {
                    pieces: vec![gone],
                    want: want.clone(),
                });
                (None, Told::Give(mine, keep, to))
            }
            Op::Want => {
                let part = *parts.find(|(_, part)| theirs(part))?.0;
                (
                    Some(new.clone()),
                    Told::Want(part, want(node.name, &new.id, 1)),
                )
            }
            Op::Over => {
                let (piece, part) = parts.find(|(_, part)| theirs(part))?;
                (None, Told::Over(*piece, part.id.clone()))
            }
            Op::Take => {
                let (piece, part) = parts.find(|(_, part)| theirs(part))?;
                (Some(new.clone()), Told::Take(*piece, part.id.clone(), new))
            }
            Op::NotOver => {
                let (piece, part) = parts.find(|(_, part)| !theirs(part))?;
                (
                    Some(new.clone()),
                    Told::NotOver(*piece, part.id.clone(), new),
                )
            }
        };
        Some((by, told))
    }

    /// A consistent read: I3.
    fn look(&mut self, me: usize) {
        let node = &mut self.nodes[me];
        let by = |id: &str| holder(node.name, id);
        node.owned
            .retain(|piece, id| self.document.confirms(&by(id), *piece));
        for (piece, part) in &self.document.parts {
            let Some(id) = &part.id else { continue };
            if node.pending.contains(id) && self.document.confirms(&by(id), *piece) {
                node.owned.insert(*piece, id.clone());
                node.pending.remove(id);
            }
        }
    }

    fn next_step(&mut self, me: usize) {
        let node = &mut self.nodes[me];
        (node.at, node.change) = (node.at + 1, None);
    }

    /// Read, and change unless that is done or refused.
    fn read(&self, me: usize, op: Op) -> Option<Self> {
        let mut world = self.clone();
        world.look(me);
        if op == Op::Take && !world.nodes[1 - me].dead {
            return None;
        }
        let chosen = world.nodes[me]
            .change
            .clone()
            .or_else(|| world.choose(me, op));
        let Some((by, told_change)) = chosen else {
            world.next_step(me);
            return Some(world);
        };
        let node = &mut world.nodes[me];
        if let (Told::Give(by, keep, _), false) = (&told_change, world.gives_late) {
            // Out of the file first.
            node.owned.retain(|_, id| *id != by.id);
            node.owned
                .extend(keep.iter().map(|piece| (*piece, by.id.clone())));
            node.pending.remove(&by.id);
        }
        node.pending.extend(by.iter().map(|by| by.id.clone()));
        node.change = Some((by, told_change.clone()));
        match change(&world.document, &told(node.name, &told_change)) {
            Ok(Changed {
                document: Some(next),
                ..
            }) => {
                node.awaited = Some(Some(next));
            }
            Ok(_) => {
                world.look(me);
                world.next_step(me);
            }
            Err(_) => world.next_step(me),
        }
        Some(world)
    }

    fn swap(&mut self, swap: &Swap) -> bool {
        let Some(next) = swap else { return false };
        self.document = next.clone();
        for node in &mut self.nodes {
            node.awaited = node.awaited.take().map(|_| None);
            node.late = None;
        }
        true
    }

    /// All worlds after one step of a node.
    fn steps(&self, me: usize, program: &[Op]) -> Vec<Self> {
        let mut next = Vec::new();
        let node = &self.nodes[me];
        if let Some(late) = &node.late {
            let mut world = self.clone();
            world.nodes[me].late = None;
            world.swap(late);
            next.push(world);
        }
        if node.dead {
            // Its file is of another boot until a read confirms it.
            let mut world = self.clone();
            world.nodes[me].dead = false;
            world.look(me);
            next.push(world);
            return next;
        }
        if self.nodes.iter().all(|node| node.deaths == 0) {
            let mut world = self.clone();
            let node = &mut world.nodes[me];
            (node.dead, node.deaths, node.change) = (true, 1, None);
            node.late = node
                .awaited
                .take()
                .filter(Option::is_some)
                .or(node.late.take());
            node.pending.clear();
            next.push(world);
        }
        match (&node.awaited, program.get(node.at)) {
            (Some(swap), _) => {
                let mut answered = self.clone();
                answered.nodes[me].awaited = None;
                let won = answered.swap(swap);
                let may_lose = self.nodes.iter().all(|node| node.lost == 0);
                if won && may_lose {
                    // The answer is lost.
                    let mut lost = answered.clone();
                    lost.nodes[me].lost = 1;
                    next.push(lost);
                }
                if won {
                    answered.look(me);
                    answered.next_step(me);
                }
                next.push(answered);
                if may_lose && node.late.is_none() && swap.is_some() {
                    // It arrives later.
                    let mut late = self.clone();
                    let node = &mut late.nodes[me];
                    (node.late, node.lost) = (node.awaited.take(), 1);
                    next.push(late);
                }
            }
            (None, Some(op)) => next.extend(self.read(me, *op)),
            (None, None) => {}
        }
        next
    }

    fn check(&self) -> Result<(), String> {
        if !self.document.in_doubt().is_empty() {
            return Err("parts overlap".to_owned());
        }
        let [one, other] = &self.nodes;
        let both_alive = !one.dead && !other.dead;
        let mut pairs = one
            .owned
            .keys()
            .flat_map(|piece| other.owned.keys().map(move |with| (piece, with)));
        match pairs.find(|(piece, with)| both_alive && overlap(**piece, **with)) {
            Some((piece, with)) => Err(format!("both have an address of {piece} and {with}")),
            None => Ok(()),
        }
    }
}

/// Explores two programs; returns how many worlds there are.
fn explore(programs: [&[Op]; 2], gives_late: bool) -> Result<usize, String> {
    let node = |name| Node {
        name,
        ..Node::default()
    };
    let start = World {
        document: empty(),
        nodes: [node("a"), node("b")],
        gives_late,
    };
    let mut seen = HashSet::from([start.clone()]);
    let mut open = vec![start];
    while let Some(world) = open.pop() {
        if let Err(why) = world.check() {
            return Err(format!("{why} with {programs:?}: {world:#?}"));
        }
        for (me, program) in programs.iter().enumerate() {
            for next in world.steps(me, program) {
                if seen.insert(next.clone()) {
                    open.push(next);
                }
            }
        }
    }
    Ok(seen.len())
}

#[test]
fn no_order_of_two_nodes_gives_an_address_to_both() {
    use Op::{Claim, Cut, Give, NotOver, Over, Take, Want};
    let programs: &[&[Op]] = &[
        &[Claim(2), Give, Claim(1)],
        &[Claim(2), Cut, NotOver],
        &[Claim(1), Give, NotOver],
        &[Claim(1), Want, Give],
        &[Over, Take, Give],
        &[Claim(1), Over, Take],
        &[NotOver, Cut, Claim(2)],
    ];
    let mut worlds = 0;
    for (at, one) in programs.iter().enumerate() {
        for other in &programs[at..] {
            worlds += explore([one, other], false).unwrap_or_else(|why| panic!("{why}"));
        }
    }
    assert!(worlds > 50_000, "{worlds} worlds");
}

#[test]
fn a_node_that_leases_from_what_it_is_about_to_give_is_found() {
    let programs: [&[Op]; 2] = [&[Op::Claim(2), Op::Give], &[Op::Claim(2)]];
    assert!(explore(programs, false).is_ok());
    let why = explore(programs, true).unwrap_err();
    assert!(why.starts_with("both have an address"), "{why}");
}
