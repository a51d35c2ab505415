//! Aligned pieces of a subnet.

use super::{ADDRESSES, Document, subnet_of};
use crate::range::{Range, Span, bits, from_bits};
use crate::space::longest;
use ipnetwork::IpNetwork;

/// Whether something is an aligned piece of a subnet.
#[must_use]
pub fn is_piece(subnet: IpNetwork, piece: IpNetwork) -> bool {
    piece.ip() == piece.network()
        && piece.prefix() >= subnet.prefix()
        && subnet_of(piece.ip()) == subnet
}

/// Whether all addresses of `inner` are in `outer`.
#[must_use]
pub fn covers(outer: IpNetwork, inner: IpNetwork) -> bool {
    outer.is_ipv4() == inner.is_ipv4()
        && outer.prefix() <= inner.prefix()
        && outer.contains(inner.network())
}

/// How many addresses it has, of one in a subnet.
#[must_use]
pub fn size(piece: IpNetwork) -> usize {
    usize::try_from(Span::of(piece).size()).unwrap_or(ADDRESSES)
}

/// All aligned pieces of so many addresses, a power of two, of a network in a subnet.
pub fn pieces(of: IpNetwork, size: usize) -> impl Iterator<Item = IpNetwork> {
    let first = bits(of.network());
    let bits_of_size = u8::try_from(size.ilog2()).unwrap_or(0);
    let prefix = longest(of.is_ipv4()) - bits_of_size;
    let count = self::size(of) / size;
    (0..count).filter_map(move |number| {
        let start = first + u128::try_from(number * size).unwrap_or(0);
        IpNetwork::new(from_bits(of.is_ipv4(), start), prefix).ok()
    })
}

/// The fewest pieces that have exactly the addresses of a network that satisfy a condition.
#[must_use]
pub fn cover(of: IpNetwork, keep: &impl Fn(std::net::IpAddr) -> bool) -> Vec<IpNetwork> {
    let all = pieces(of, 1).all(|single| keep(single.ip()));
    if all {
        return vec![of];
    }
    let half = size(of) / 2;
    if half == 0 {
        return Vec::new();
    }
    pieces(of, half)
        .flat_map(|half| cover(half, keep))
        .collect()
}

/// The free piece of exactly so many addresses that splits the smallest free piece, if one has an
/// address that is usable.
#[must_use]
pub fn free(document: &Document, size: usize, range: &Range) -> Option<IpNetwork> {
    let parts: Vec<IpNetwork> = document.parts.keys().copied().collect();
    let is_free = |piece: IpNetwork| !parts.iter().any(|part| crate::space::overlap(*part, piece));
    let range = range.within(&[document.subnet]);
    let fits = |piece: &IpNetwork| is_free(*piece) && range.size_within(*piece) > 0;
    let around = |piece: IpNetwork| {
        let mut whole = piece;
        while let Some(next) =
            parent(whole).filter(|next| next.prefix() >= document.subnet.prefix() && is_free(*next))
        {
            whole = next;
        }
        self::size(whole)
    };
    pieces(document.subnet, size)
        .filter(fits)
        .min_by_key(|piece| (around(*piece), *piece))
}

fn parent(piece: IpNetwork) -> Option<IpNetwork> {
    crate::space::network_around(piece.network(), piece.prefix().checked_sub(1)?)
}
