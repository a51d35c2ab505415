//! Where boxes and devices go: sizes from the inside out, positions from the outside in.
//!
//! Devices of a box stand in rows, GPUs above NICs, so that pairs are above each other; boxes
//! stand in a grid about as wide as high.

use super::nest::{Item, Kind};

/// Width of a device's tile.
pub(super) const TILE_WIDTH: u32 = 156;
/// Height of a device's tile.
pub(super) const TILE_HEIGHT: u32 = 104;
/// Space around things.
pub(super) const GAP: u32 = 14;
/// Height of a box's title.
pub(super) const TITLE: u32 = 26;
/// Space between a row and the next: room for the line from a GPU to its NIC.
const ROW_GAP: u32 = 30;
/// Devices in a row.
const ROW: usize = 4;

/// A rectangle in pixels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Rect {
    /// Left edge.
    pub x: u32,
    /// Top edge.
    pub y: u32,
    /// Width.
    pub width: u32,
    /// Height.
    pub height: u32,
}

impl Rect {
    /// The middle.
    #[must_use]
    pub(super) fn centre(self) -> (u32, u32) {
        (self.x + self.width / 2, self.y + self.height / 2)
    }
}

/// Something to draw at its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Shape {
    /// A box with its label.
    Box(Kind, String, Rect),
    /// A GPU, by its position.
    Gpu(usize, Rect),
    /// A NIC, by its position.
    Nic(usize, Rect),
}

impl Shape {
    /// Where it is.
    #[must_use]
    pub(super) fn rect(&self) -> Rect {
        match self {
            Self::Box(_, _, rect) | Self::Gpu(_, rect) | Self::Nic(_, rect) => *rect,
        }
    }
}

/// Lays everything out with its top left corner at `(x, y)`; outer boxes come first.
#[must_use]
pub(super) fn lay(item: &Item, x: u32, y: u32) -> Vec<Shape> {
    let mut shapes = Vec::new();
    put(item, x, y, &mut shapes);
    shapes
}

/// Draws an item and returns its rectangle.
fn put(item: &Item, x: u32, y: u32, shapes: &mut Vec<Shape>) -> Rect {
    let (width, height) = size(item);
    let rect = Rect {
        x,
        y,
        width,
        height,
    };
    match item {
        Item::Gpu(index) => shapes.push(Shape::Gpu(*index, rect)),
        Item::Nic(index) => shapes.push(Shape::Nic(*index, rect)),
        Item::Box { kind, label, items } => {
            shapes.push(Shape::Box(*kind, label.clone(), rect));
            let mut top = y + TITLE + GAP;
            for row in rows(items) {
                let mut left = x + GAP;
                let mut lowest = 0;
                for item in row.items {
                    let placed = put(item, left, top, shapes);
                    left += placed.width + GAP;
                    lowest = lowest.max(placed.height);
                }
                top += lowest + row.gap;
            }
        }
    }
    rect
}

fn size(item: &Item) -> (u32, u32) {
    let Item::Box { label, items, .. } = item else {
        return (TILE_WIDTH, TILE_HEIGHT);
    };
    let (mut width, mut height) = (label_width(label), TITLE + GAP);
    for row in rows(items) {
        let sizes: Vec<(u32, u32)> = row.items.iter().map(|item| size(item)).collect();
        width = width.max(sizes.iter().map(|(width, _)| width + GAP).sum());
        height += sizes
            .iter()
            .map(|(_, height)| *height)
            .max()
            .unwrap_or_default()
            + row.gap;
    }
    (width + GAP, height)
}

/// About as wide as the label is drawn.
fn label_width(label: &str) -> u32 {
    u32::try_from(label.chars().count())
        .unwrap_or_default()
        .min(60)
        * 8
        + GAP
}

/// Things beside each other, and the space below them.
struct Row<'a> {
    items: Vec<&'a Item>,
    gap: u32,
}

fn in_rows<'a>(items: &[&'a Item], length: usize, gap: u32) -> Vec<Row<'a>> {
    items
        .chunks(length)
        .map(|row| Row {
            items: row.to_vec(),
            gap,
        })
        .collect()
}

/// A box's content in rows: GPUs, NICs, then boxes.
fn rows(items: &[Item]) -> Vec<Row<'_>> {
    let of = |wanted: fn(&Item) -> bool| -> Vec<&Item> {
        items.iter().filter(|item| wanted(item)).collect()
    };
    let gpus = of(|item| matches!(item, Item::Gpu(_)));
    let nics = of(|item| matches!(item, Item::Nic(_)));
    let boxes = of(|item| matches!(item, Item::Box { .. }));
    // The least number of columns whose square is enough: 2 for up to 4, 3 for up to 9.
    let columns = (1..=boxes.len())
        .find(|n| n * n >= boxes.len())
        .unwrap_or(1);
    let below_gpus = if nics.is_empty() && boxes.is_empty() {
        GAP
    } else {
        ROW_GAP
    };
    let mut rows = in_rows(&gpus, ROW, below_gpus);
    rows.extend(in_rows(&nics, ROW, GAP));
    rows.extend(in_rows(&boxes, columns, GAP));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn item() -> impl Strategy<Value = Item> {
        let leaf = prop_oneof![
            (0_usize..9).prop_map(Item::Gpu),
            (0_usize..9).prop_map(Item::Nic)
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            ("[a-z ]{0,70}", prop::collection::vec(inner, 0..6)).prop_map(|(label, items)| {
                Item::Box {
                    kind: Kind::Switch,
                    label,
                    items,
                }
            })
        })
    }

    impl Rect {
        /// True if the other lies inside.
        fn holds(self, other: Self) -> bool {
            self.x <= other.x
                && self.y <= other.y
                && self.x + self.width >= other.x + other.width
                && self.y + self.height >= other.y + other.height
        }

        /// True if they share a pixel.
        fn meets(self, other: Self) -> bool {
            self.x < other.x + other.width
                && other.x < self.x + self.width
                && self.y < other.y + other.height
                && other.y < self.y + self.height
        }
    }

    proptest! {
        /// The picture would lie otherwise: a device would seem to be in a box that it is not in.
        #[test]
        fn boxes_hold_what_is_in_them_and_nothing_else_overlaps(item in item()) {
            let shapes = lay(&item, 10, 20);
            for (at, a) in shapes.iter().enumerate() {
                for b in shapes.iter().skip(at + 1) {
                    let (a, b) = (a.rect(), b.rect());
                    prop_assert!(a.holds(b) || !a.meets(b), "{:?} and {:?}", a, b);
                }
            }
        }
    }

    #[test]
    fn gpus_stand_above_nics() {
        let items = vec![Item::Nic(0), Item::Gpu(0)];
        let shapes = lay(
            &Item::Box {
                kind: Kind::Switch,
                label: String::new(),
                items,
            },
            0,
            0,
        );
        let at = |wanted: fn(&Shape) -> bool| shapes.iter().find(|s| wanted(s)).unwrap().rect();
        let gpu = at(|shape| matches!(shape, Shape::Gpu(..)));
        let nic = at(|shape| matches!(shape, Shape::Nic(..)));
        assert!(gpu.y + gpu.height < nic.y);
        assert_eq!(gpu.x, nic.x);
    }
}
