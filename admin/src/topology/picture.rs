//! A picture of the node as SVG: boxes in boxes, so that the smallest box around two devices is
//! how far apart they are.
//!
//! - `nest`: which box holds what, from the places of GPUs and NICs
//! - `layout`: where everything goes, in pixels
//! - `draw`: the text of the SVG

mod draw;
mod layout;
mod nest;

pub(super) use draw::svg;
