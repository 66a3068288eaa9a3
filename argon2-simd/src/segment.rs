//! The order in which Argon2 fills its memory, and the reference blocks that it reads (RFC 9106, 3.4).

use argon2::Params;

/// The number of slices in a pass. A block can refer to blocks in all lanes. In other lanes, it can only refer to
/// complete slices.
pub(crate) const SLICES: usize = 4;

/// The shape of the memory: `lanes` rows of `SLICES` segments each.
#[derive(Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) lanes: usize,
    /// Blocks in a segment, which is the part of a lane in one slice.
    pub(crate) segment_length: usize,
}

/// One segment in one pass.
pub(crate) struct Segment {
    pub(crate) geometry: Geometry,
    pub(crate) pass: usize,
    pub(crate) slice: usize,
    pub(crate) lane: usize,
}

/// Consecutive blocks to fill.
pub(crate) struct Run<'a> {
    /// The index of the block before the first block to fill. If the first block to fill is the first block of its
    /// lane, this is the last block of the lane.
    pub(crate) previous: usize,
    /// The index of the first block to fill.
    pub(crate) destination: usize,
    /// The number of blocks to fill.
    pub(crate) count: usize,
    pub(crate) references: References<'a>,
    /// Whether the blocks are overwritten. Otherwise the result is combined with the old block by XOR.
    pub(crate) overwrite: bool,
}

/// How the reference block of each block of a [`Run`] is found.
pub(crate) enum References<'a> {
    /// Data-independent: all indices are known, and do not depend on the password.
    Known(&'a [usize]),
    /// Data-dependent: the index follows from word 0 of the previous block. `first` is the position of the first block
    /// to fill, counted from the start of the segment.
    Dependent { segment: &'a Segment, first: usize },
}

// === impl Geometry ===

impl Geometry {
    pub(crate) fn new(params: &Params) -> Self {
        let lanes = usize::try_from(params.p_cost()).expect("a u32 fits into a usize");
        Self { lanes, segment_length: params.block_count() / (lanes * SLICES) }
    }

    pub(crate) const fn lane_length(&self) -> usize {
        SLICES * self.segment_length
    }

    pub(crate) const fn block_count(&self) -> usize {
        self.lanes * self.lane_length()
    }
}

// === impl Segment ===

impl Segment {
    /// The position of the first block to fill. The first two blocks of each lane are filled before the first pass.
    pub(crate) const fn first(&self) -> usize {
        if self.pass == 0 && self.slice == 0 { 2 } else { 0 }
    }

    /// The index in memory of the block at this position of the segment.
    pub(crate) const fn block(&self, position: usize) -> usize {
        self.lane * self.geometry.lane_length() + self.slice * self.geometry.segment_length + position
    }

    /// The index in memory of the block before the block at this position.
    pub(crate) const fn previous(&self, position: usize) -> usize {
        if self.slice == 0 && position == 0 {
            self.block(0) + self.geometry.lane_length() - 1
        } else {
            self.block(position) - 1
        }
    }

    /// Returns the index in memory of the reference block for the block at this position. `value`: the pseudo-random
    /// value J1 | J2 << 32 (RFC 9106, 3.4.1.1, 3.4.1.2 and 3.4.2).
    #[inline(always)]
    pub(crate) fn reference(&self, position: usize, value: u64) -> usize {
        let Geometry { lanes, segment_length } = self.geometry;
        let lane_length = self.geometry.lane_length();
        let lane =
            if lanes == 1 || (self.pass == 0 && self.slice == 0) { self.lane } else { (value >> 32) as usize % lanes };
        // The area contains the blocks to which this block can refer. In the first pass, it starts at the beginning of
        // the lane. In later passes, it starts after the slice of this block, where the oldest slice begins.
        let (complete_slices, start) = if self.pass == 0 {
            (self.slice, 0)
        } else {
            (SLICES - 1, if self.slice == SLICES - 1 { 0 } else { (self.slice + 1) * segment_length })
        };
        // In its own lane, a block can refer to all blocks before its previous block. In another lane, it can refer to
        // the complete slices. The first block of a segment, however, cannot refer to the last block of these slices.
        let area = complete_slices * segment_length;
        let area = if lane == self.lane { area + position - 1 } else { area - usize::from(position == 0) };
        let j1 = value & u64::from(u32::MAX);
        let distance = ((area as u64 * ((j1 * j1) >> 32)) >> 32) as usize;
        let position = start + area - 1 - distance;
        let position = if position >= lane_length { position - lane_length } else { position };
        lane * lane_length + position
    }
}

// === impl Run ===

impl Run<'_> {
    /// Whether the reference blocks are independent of the password, so that they can be loaded long in advance.
    #[inline(always)]
    pub(crate) const fn is_data_independent(&self) -> bool {
        matches!(self.references, References::Known(_))
    }

    /// Returns the index of the reference block for the block with this number in the run. `word` is word 0 of the
    /// previous block; data-independent runs ignore `word`.
    #[inline(always)]
    pub(crate) fn reference(&self, number: usize, word: u64) -> usize {
        let index = match self.references {
            References::Known(indices) => indices[number],
            References::Dependent { segment, first } => segment.reference(first + number, word),
        };
        #[cfg(test)]
        crate::tests::record(match self.references {
            References::Known(_) => crate::tests::Event::Independent(index),
            References::Dependent { .. } => crate::tests::Event::Dependent(index),
        });
        index
    }
}
