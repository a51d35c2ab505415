//! The SVG itself.

use std::fmt::Write;

use hca::LinkLayer;
use hca::topology::{Gpu, Nic, Pair};

use super::layout::{self, GAP, Rect, Shape};
use super::nest::{self, Kind};
use crate::topology::matrix;
use crate::topology::view::View;

/// Height of the explanation below the machine, without its lines.
const FOOT: u32 = 80;
/// Height of a line of text below the machine.
const LINE: u32 = 18;

/// Fill and stroke of the tiles.
const GPU: (&str, &str) = ("#dff3dc", "#3a8f3a");
const NIC: (&str, &str) = ("#deebfb", "#2f6fb5");
const DOWN: (&str, &str) = ("#fbe0dd", "#c0392b");
const CHOSEN: (&str, &str) = ("#deebfb", "#e67e00");
const POD: (&str, &str) = ("#7a3e9d", "#7a3e9d");

const STYLE: &str = "text{font-family:DejaVu Sans,Verdana,Helvetica,sans-serif;font-size:11px;fill:#222}\
.h{font-size:17px;font-weight:bold}.b{font-weight:bold;font-size:13px}.t{font-size:12px;fill:#444}\
.s{fill:#555}.pod{font-size:10px;fill:#fff}";

/// Draws the node. `title` stands above it.
#[must_use]
pub(crate) fn svg(view: &View, title: &str) -> String {
    let shapes = layout::lay(&nest::nest(&view.machine, title), GAP, GAP);
    let machine = shapes.first().map(Shape::rect).unwrap_or_default();
    let notes = view.notes();
    let inner = machine.width.max(legend_width());
    let lines: Vec<String> = notes.iter().flat_map(|note| wrap(note, inner)).collect();
    let width = inner + 2 * GAP;
    let text_lines = u32::try_from(lines.len()).unwrap_or_default();
    let height = machine.height + GAP + FOOT + LINE * text_lines + GAP;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\">\n<style>{STYLE}</style>\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n"
    );
    for shape in &shapes {
        match shape {
            Shape::Box(kind, label, rect) => draw_box(&mut svg, *kind, label, *rect),
            Shape::Gpu(index, rect) => {
                if let Some(gpu) = view.machine.gpus.get(*index) {
                    draw_gpu(&mut svg, view, gpu, *rect);
                }
            }
            Shape::Nic(index, rect) => {
                if let Some(nic) = view.machine.nics.get(*index) {
                    draw_nic(&mut svg, view, *index, nic, *rect);
                }
            }
        }
    }
    for pair in view.choice.iter().flat_map(|choice| &choice.pairs) {
        draw_pair(&mut svg, &shapes, pair);
    }
    draw_foot(&mut svg, machine, &lines);
    svg.push_str("</svg>\n");
    svg
}

fn draw_box(svg: &mut String, kind: Kind, label: &str, rect: Rect) {
    let (fill, stroke, width, class) = match kind {
        Kind::Machine => ("#ffffff", "#333333", 2, "h"),
        Kind::Package => ("#e6e6ea", "#77777f", 1, "t"),
        Kind::Numa => ("#f1f1f4", "#8a8a94", 2, "b"),
        Kind::HostBridge => ("#fbf3df", "#b58a2c", 1, "t"),
        Kind::Switch => ("#ffffff", "#5b4a99", 2, "t"),
        Kind::Card => ("#eef3fb", "#2f6fb5", 1, "t"),
    };
    rectangle(svg, rect, 8, fill, stroke, width);
    text(svg, rect.x + GAP, rect.y + 20, class, label);
}

fn draw_gpu(svg: &mut String, view: &View, gpu: &Gpu, rect: Rect) {
    rectangle(svg, rect, 5, GPU.0, GPU.1, 2);
    let lines = [
        gpu.title(),
        gpu.place.address.to_string(),
        format!("PCIe {}", matrix::link(gpu.link)),
    ];
    tile(svg, rect, &matrix::gpu_name(gpu), &lines);
    pod_strip(svg, rect, &view.holders.gpu(gpu));
}

fn draw_nic(svg: &mut String, view: &View, index: usize, nic: &Nic, rect: Rect) {
    let down = nic.rate_mbps.is_none() && !nic.elsewhere;
    let (fill, stroke) = if down { DOWN } else { NIC };
    let chosen = view
        .choice
        .as_ref()
        .is_some_and(|choice| choice.nics.contains(&index));
    let (stroke, width) = if chosen { (CHOSEN.1, 4) } else { (stroke, 2) };
    rectangle(svg, rect, 5, fill, stroke, width);
    let layer = match nic.link_layer {
        LinkLayer::Ethernet => "Ethernet",
        LinkLayer::InfiniBand => "InfiniBand",
        LinkLayer::Unknown => "",
    };
    let netdev = match nic.netdevs.first() {
        Some(netdev) => netdev.clone(),
        None if nic.elsewhere => "in a pod".to_owned(),
        None => "no netdev".to_owned(),
    };
    let lines = [
        match &nic.rail {
            Some(rail) => format!("{netdev} · rail {}", rail.number),
            None => format!("{netdev} · no rail"),
        },
        nic.hca.to_string(),
        format!("{} {layer}", matrix::rate(nic)),
        match nic.virtual_functions {
            0 => format!("PCIe {}", matrix::link(nic.link)),
            count => format!("PCIe {} · {count} VFs", matrix::link(nic.link)),
        },
    ];
    tile(svg, rect, &nic.title(), &lines);
    pod_strip(svg, rect, &view.holders.nic(nic));
}

/// A tile's name and lines.
fn tile(svg: &mut String, rect: Rect, name: &str, lines: &[String]) {
    text(svg, rect.x + 8, rect.y + 18, "b", &cut(name, 18));
    let mut y = rect.y + 34;
    for line in lines {
        text(svg, rect.x + 8, y, "s", &cut(line, 24));
        y += 15;
    }
}

/// Who has the device, along the tile's lower edge.
fn pod_strip(svg: &mut String, rect: Rect, pods: &[String]) {
    let Some(first) = pods.first() else { return };
    let strip = Rect {
        y: rect.y + rect.height - 16,
        height: 16,
        ..rect
    };
    rectangle(svg, strip, 5, POD.0, POD.1, 1);
    let more = if pods.len() > 1 {
        format!(" +{}", pods.len() - 1)
    } else {
        String::new()
    };
    let label = format!("{}{more}", cut(first, 26 - more.len()));
    text(svg, strip.x + 8, strip.y + 12, "pod", &label);
}

/// A line from a GPU to the NIC that serves it.
fn draw_pair(svg: &mut String, shapes: &[Shape], pair: &Pair) {
    let gpu = shapes
        .iter()
        .find(|s| matches!(s, Shape::Gpu(index, _) if *index == pair.gpu));
    let nic = shapes
        .iter()
        .find(|s| matches!(s, Shape::Nic(index, _) if *index == pair.nic));
    let (Some(gpu), Some(nic)) = (gpu, nic) else {
        return;
    };
    let ((x1, y1), (x2, y2)) = (gpu.rect().centre(), nic.rect().centre());
    let (y1, y2) = (
        y1 + layout::TILE_HEIGHT / 2,
        y2.saturating_sub(layout::TILE_HEIGHT / 2),
    );
    let (stroke, dash) = if pair.aligned {
        (CHOSEN.1, "")
    } else {
        (DOWN.1, "8 5")
    };
    let middle = y1.midpoint(y2);
    let _ = writeln!(
        svg,
        "<path d=\"M{x1} {y1} C{x1} {middle} {x2} {middle} {x2} {y2}\" fill=\"none\" \
         stroke=\"{stroke}\" stroke-width=\"4\" stroke-dasharray=\"{dash}\" stroke-linecap=\"round\"/>"
    );
    let (x, y) = (x1.midpoint(x2), middle + 4);
    let label = pair.distance.to_string();
    let half = 6 + 4 * u32::try_from(label.len()).unwrap_or_default();
    let plate = Rect {
        x: x.saturating_sub(half),
        y: y - 13,
        width: 2 * half,
        height: 18,
    };
    rectangle(svg, plate, 9, "#ffffff", stroke, 1);
    text(svg, plate.x + 6, y, "s", &label);
}

/// What boxes and colours say, with the width each takes.
const LEGEND: [&[(Swatch, &str)]; 2] = [
    &[
        (Swatch::Box(Kind::Switch), "one switch or card: PIX"),
        (Swatch::Box(Kind::Switch), "switch in switch: PXB"),
        (Swatch::Box(Kind::HostBridge), "host bridge: PHB"),
        (Swatch::Box(Kind::Numa), "NUMA node: NODE"),
        (Swatch::Box(Kind::Machine), "the machine: SYS"),
    ],
    &[
        (Swatch::Tile(GPU), "GPU"),
        (Swatch::Tile(NIC), "NIC"),
        (Swatch::Tile(DOWN), "NIC without an active port"),
        (Swatch::Tile(CHOSEN), "chosen"),
        (Swatch::Tile(POD), "held by a pod"),
    ],
];

/// A sample in the legend.
#[derive(Clone, Copy)]
enum Swatch {
    Box(Kind),
    Tile((&'static str, &'static str)),
}

fn legend_entry_width(words: &str) -> u32 {
    44 + 7 * u32::try_from(words.len()).unwrap_or_default()
}

fn legend_width() -> u32 {
    let row =
        |row: &&[(Swatch, &str)]| row.iter().map(|(_, words)| legend_entry_width(words)).sum();
    LEGEND.iter().map(row).max().unwrap_or_default()
}

/// How to read it, and the notes.
fn draw_foot(svg: &mut String, machine: Rect, lines: &[String]) {
    let mut y = machine.y + machine.height + 24;
    let rule = "The smallest box around two devices says how far apart they are:";
    text(svg, machine.x, y, "t", rule);
    for row in LEGEND {
        y += 22;
        let mut x = machine.x;
        for (swatch, words) in row {
            let sample = Rect {
                x,
                y: y - 12,
                width: 20,
                height: 14,
            };
            match swatch {
                Swatch::Box(kind) => draw_box(svg, *kind, "", sample),
                Swatch::Tile((fill, stroke)) => rectangle(svg, sample, 3, fill, stroke, 2),
            }
            text(svg, x + 27, y, "t", words);
            x += legend_entry_width(words);
        }
    }
    y += 8;
    for line in lines {
        y += LINE;
        text(svg, machine.x, y, "s", line);
    }
}

fn rectangle(svg: &mut String, rect: Rect, radius: u32, fill: &str, stroke: &str, width: u32) {
    let Rect {
        x,
        y,
        width: w,
        height: h,
    } = rect;
    let _ = writeln!(
        svg,
        "<rect x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{h}\" rx=\"{radius}\" fill=\"{fill}\" \
         stroke=\"{stroke}\" stroke-width=\"{width}\"/>"
    );
}

fn text(svg: &mut String, x: u32, y: u32, class: &str, words: &str) {
    if !words.is_empty() {
        let words = escaped(words);
        let _ = writeln!(
            svg,
            "<text x=\"{x}\" y=\"{y}\" class=\"{class}\">{words}</text>"
        );
    }
}

/// Names come from firmware, administrators and pods: nothing in them may end the text. Control
/// characters are not allowed in XML at all.
fn escaped(words: &str) -> String {
    let mut safe = String::with_capacity(words.len());
    for c in words.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&apos;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

/// The words, shortened in the middle to at most `most` characters: the end of a pod's name
/// distinguishes it from its siblings.
fn cut(words: &str, most: usize) -> String {
    let count = words.chars().count();
    if count <= most {
        return words.to_owned();
    }
    let head: String = words.chars().take(most / 2).collect();
    let tail: String = words.chars().skip(count - (most - most / 2 - 1)).collect();
    format!("{head}…{tail}")
}

/// Breaks a note into lines that fit a width in pixels.
fn wrap(note: &str, width: u32) -> Vec<String> {
    let most = usize::try_from(width / 7).unwrap_or(80).max(40);
    let mut lines = vec!["• ".to_owned()];
    for word in note.split(' ') {
        let Some(line) = lines.last_mut() else { break };
        if line.chars().count() + word.chars().count() > most {
            lines.push(format!("   {word} "));
        } else {
            line.push_str(word);
            line.push(' ');
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::holders::example::holders;
    use hca::topology::{Machine, Request, Wanted, choose};
    use hca_trees::{Tree, machine};
    use proptest::prelude::*;

    fn view(lay: impl Fn(&Tree)) -> View {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::new(directory.path());
        lay(&tree);
        let inventory = hca::inventory(&tree.host()).unwrap();
        let machine = Machine::read(&tree.host(), &inventory, &Wanted::default()).unwrap();
        View {
            machine,
            ..View::default()
        }
    }

    fn texts(svg: &str) -> Vec<String> {
        let document = roxmltree::Document::parse(svg).unwrap();
        document
            .descendants()
            .filter_map(|node| node.text().map(str::to_owned))
            .collect()
    }

    #[test]
    fn every_device_is_named_in_the_picture() {
        for lay in [
            machine::a4 as fn(&Tree),
            machine::p4d,
            machine::nd_h100,
            machine::oci_h100,
        ] {
            let view = view(lay);
            let texts = texts(&svg(&view, "node"));
            for gpu in &view.machine.gpus {
                assert!(texts.contains(&format!("GPU {}", gpu.ordinal)));
                assert!(texts.contains(&gpu.place.address.to_string()));
            }
            for nic in &view.machine.nics {
                assert!(texts.contains(&nic.title()), "{}", nic.title());
                assert!(texts.contains(&nic.hca.to_string()));
            }
        }
    }

    #[test]
    fn pods_and_chosen_pairs_are_drawn() {
        let mut view = view(machine::a4);
        view.holders = holders(&[], &[("ns/pod-0", "0000:91:00.0")]);
        let request = Request {
            gpus: [0, 7].into(),
            count: 2,
            taken: [6, 7].into(),
            ..Request::default()
        };
        view.choice = Some(choose(&view.machine, &request).unwrap());
        let svg = svg(&view, "node");
        assert!(texts(&svg).contains(&"ns/pod-0".to_owned()));
        assert_eq!(svg.matches("<path ").count(), 2);
        assert_eq!(
            svg.matches("stroke-dasharray=\"8 5\"").count(),
            1,
            "GPU 7 is served from afar"
        );
    }

    proptest! {
        #[test]
        fn no_name_breaks_the_document(name in "\\PC*|[\\x00-\\x20<&>\"']*", pod in "\\PC{0,80}") {
            let view = View { remarks: vec![pod], ..View::default() };
            let drawn = svg(&view, &name);
            prop_assert!(roxmltree::Document::parse(&drawn).is_ok(), "{}", drawn);
        }
    }

    #[test]
    fn long_names_keep_their_end() {
        assert_eq!(cut("training/llama-worker-0", 14), "trainin…rker-0");
        assert_eq!(cut("short", 14), "short");
    }
}
