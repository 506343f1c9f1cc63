// Passes over the bags for GPUs from Hopper on: rows of H come from memory once, ahead of their use.
//
// Shared memory is a ring of RING rows of H. One warp sends for the rows, bag after bag; TEAMS teams
// of THREADS threads take the bags in turn as they arrive, multiply them twice, by w and by what
// follows from that, and give their rows back. So rows are on their way while others are worked on,
// and one team multiplies while another one waits for its logarithms. A bag of more than RING rows
// is read where it is.
//
// Constants come with the compilation: M columns (a multiple of 4: copies go by 16 bytes), RING,
// K neighbours, THREADS, TEAMS, and SWEEP or RISE, which is wanted. Names and formulas are those of fused_kernel.py, whose twin it is.
// In a sweep, multiplied in float32, P comes in float32 as well: fewer bytes beside those of H.

typedef long long Index;
typedef unsigned long long Barrier;
constexpr int QUADS = M / 4;             // of columns
constexpr int GROUPS = THREADS / QUADS;  // rows that threads multiply side by side
constexpr int WARPS = THREADS / 32;
constexpr int PER_LANE = (QUADS + 31) / 32;
constexpr int SLOTS = 32;  // bags in the ring at most

// --- Barriers in shared memory -------------------------------------------------------------------
__device__ unsigned address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ void init(Barrier* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(barrier)));
}
__device__ void arrive(Barrier* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}
__device__ void expect(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 ::"r"(address(barrier)), "r"(bytes) : "memory");
}
// Wait for the bag `turn`: its slot has served others before, one phase each.
__device__ void wait(Barrier* slots, int turn) {
    unsigned done = 0, parity = (turn / SLOTS) & 1;
    while (!done)
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(address(slots + turn % SLOTS)), "r"(parity) : "memory");
}
// Rows of H are read once in a pass: they leave the cache to what is small enough to stay in it.
__device__ unsigned long long not_kept() {
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ void copy(
    const float* from, float* to, int rows, Barrier* barrier, unsigned long long policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;"
        ::"r"(address(to)), "l"(from), "r"(rows * M * 4), "r"(address(barrier)), "l"(policy)
        : "memory");
}

// --- The ring ------------------------------------------------------------------------------------
struct Bags {
    const float* H;
    const Index *offsets, *order;
    const signed char* positive;
    int n_bags;
};

// One bag in its slot: where it is, in memory and in the ring.
struct Slot {
    Index bag, start;
    int n, base;
    bool is_positive;
};

// Send for the rows of every bag of this program, as room is given back. Lanes look up 32 bags.
__device__ void send_for_rows(
    const Bags& all, float* ring, Slot* slots, Barrier* arrived, Barrier* given_back) {
    int lane = threadIdx.x % 32, place = 0, room = RING, oldest = 0;
    int count = (all.n_bags - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
    unsigned long long policy = not_kept();
    for (int turns = 0; turns < count; turns += 32) {
        int own = min(turns + lane, count - 1);
        // by turns one of the largest and one of the smallest: two large ones would fill the ring
        own = own % 2 ? count - 1 - own / 2 : own / 2;
        Index own_bag = all.order[blockIdx.x + (Index)own * gridDim.x];
        Index own_start = all.offsets[own_bag];
        int own_n = (int)(all.offsets[own_bag + 1] - own_start), own_sign = all.positive[own_bag];
        for (int turn = turns; turn < min(turns + 32, count); ++turn) {
            Index bag = __shfl_sync(~0u, own_bag, turn - turns);
            Index start = __shfl_sync(~0u, own_start, turn - turns);
            int n = __shfl_sync(~0u, own_n, turn - turns), rows = n > RING ? 0 : n;
            int sign = __shfl_sync(~0u, own_sign, turn - turns);
            if (lane) continue;
            Barrier* barrier = arrived + turn % SLOTS;
            for (int sent = 0, part; sent == 0 || sent < rows; sent += part) {
                while ((rows && !room) || turn - oldest == SLOTS) {
                    wait(given_back, oldest);
                    int freed = slots[oldest++ % SLOTS].n;
                    room += freed > RING ? 0 : freed;
                }
                if (sent == 0) {
                    slots[turn % SLOTS] = Slot{bag, start, n, place, sign != 0};
                    expect(barrier, rows * M * 4);
                }
                if (rows == 0) break;
                // up to the end of the ring, or of the room
                part = min(min(rows - sent, room), RING - place);
                copy(all.H + (start + sent) * M, ring + place * M, part, barrier, policy);
                place = (place + part) % RING;
                room -= part;
            }
        }
        __syncwarp();
    }
}

// What belongs to the patches of one bag: in the ring from `base` on, or where it is in memory.
template <typename T, int WIDTH>
struct Rows {
    T* at;
    int base;
    bool in_ring;
    __device__ T* operator[](int i) const {
        int r = base + i;
        return at + (Index)(in_ring && r >= RING ? r - RING : r) * WIDTH;
    }
};
typedef Rows<const float, M> RowsOfH;
typedef Rows<double, 1> Values;
template <typename Number>
constexpr int CELL = 8 / sizeof(Number);  // numbers that fit into the cell of a value

// --- Numbers -------------------------------------------------------------------------------------
template <typename T>
__device__ T sum_of_warp(T x) {
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(~0u, x, d);
    return x;
}

// 1 - exp(y), y <= 0.
__device__ double minus_expm1(double y, double exp_y) {
    double series = -y * (1 + y * (0.5 + y * (1.0 / 6 + y * (1.0 / 24 + y * (1.0 / 120 + y / 720)))));
    return y > -0.01 ? series : 1 - exp_y;
}

// log(1 - Phi(t)), the hazard h(t), and h(t) - t. One logarithm for both signs: branches wait.
__device__ void tails(double t, double& log_upper, double& h, double& gap) {
    double x = fabs(t) * 0.7071067811865476, g = erfcx(x), e = exp(-x * x);
    double tail = 0.5 * e * g;  // Phi(-|t|)
    bool left = t < 0;
    log_upper = log1p(left ? -tail : 0.5 * g - 1) - (left ? 0.0 : x * x);
    // sqrt(1/(2 pi)) exp(-t^2/2) / (1 - Phi(t)) on the left, sqrt(2/pi) / erfcx on the right
    h = (left ? 0.3989422804014327 * e : 0.7978845608028654) / (left ? 1 - tail : g);
    gap = h - t;
    if (t > 50) {  // h - t = 1/t - 2/t^3 + 10/t^5 - 74/t^7 + 706/t^9 where it would cancel
        double s = 1 / t, s2 = s * s;
        gap = s * (1 + s2 * (-2 + s2 * (10 + s2 * (-74 + s2 * 706))));
    }
}

// --- One team of threads -------------------------------------------------------------------------
struct Team {
    int number, tid;
    __device__ void together() const {
        asm volatile("bar.sync %0, %1;" ::"r"(number + 1), "r"(THREADS) : "memory");
    }
};

// mu = c + H w, a warp per eight rows. Number: in which it is multiplied.
template <typename Number>
__device__ void times(
    const Team& team, const RowsOfH& H, int n, const Number (&w)[PER_LANE][4], double c,
    const Values& mu) {
    int lane = team.tid % 32;
    for (int i = 8 * (team.tid / 32); i < n; i += 8 * WARPS) {
        Number x[8];
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const float4* row = (const float4*)H[min(i + r, n - 1)];
            x[r] = 0;
#pragma unroll
            for (int q = 0; q < PER_LANE; ++q)
                if (lane + 32 * q < QUADS) {
                    float4 h = row[lane + 32 * q];
                    x[r] += Number(h.x) * w[q][0] + Number(h.y) * w[q][1];
                    x[r] += Number(h.z) * w[q][2] + Number(h.w) * w[q][3];
                }
        }
        // at each exchange a lane gives half of its rows away, and adds to the others
#pragma unroll
        for (int half = 4, d = 16; half; half /= 2, d /= 2)
#pragma unroll
            for (int r = 0; r < half; ++r) {
                Number kept = lane & d ? x[r + half] : x[r], given = lane & d ? x[r] : x[r + half];
                x[r] = kept + __shfl_xor_sync(~0u, given, d);
            }
        x[0] += __shfl_xor_sync(~0u, x[0], 2);
        x[0] += __shfl_xor_sync(~0u, x[0], 1);
        int row = i + lane / 4;  // bits 4, 3 and 2 of the lane, as the halves went
        if (lane % 4 == 0 && row < n) *mu[row] = c + double(x[0]);
    }
}

// H'x: every thread four columns of each GROUPS-th row.
template <typename Number>
__device__ void against(
    const Team& team, const RowsOfH& H, int n, const Rows<Number, CELL<Number>>& x,
    double (&sums)[4]) {
    int quad = team.tid % QUADS, group = team.tid / QUADS;
    Number s[4] = {0, 0, 0, 0};
    if (group < GROUPS) {
#pragma unroll 4
        for (int i = group; i < n; i += GROUPS) {
            float4 h = ((const float4*)H[i])[quad];
            Number by = *x[i];
            s[0] += Number(h.x) * by;
            s[1] += Number(h.y) * by;
            s[2] += Number(h.z) * by;
            s[3] += Number(h.w) * by;
        }
    }
    for (int j = 0; j < 4; ++j) sums[j] = double(s[j]);
}

__device__ double over_groups(const double* part, int m) {
    double sum = 0;
    for (int g = 0; g < GROUPS; ++g) sum += part[g * M + m];
    return sum;
}

// Row i of P: its diagonal and its neighbours, inside of the bag.
struct Stencil {
    float diagonal, weight[K];
    int near[K];
    __device__ void load(const float* d, const float* w, const int* other, Index start, Index i) {
        diagonal = d[i];
        for (int k = 0; k < K; ++k) weight[k] = w[i * K + k];
        for (int k = 0; k < K; ++k) near[k] = other[i * K + k] - (int)start;
    }
    __device__ double times(const Values& x, int i) const {
        double sum = double(diagonal) * *x[i];
        for (int k = 0; k < K; ++k) sum -= double(weight[k]) * *x[near[k]];
        return sum;
    }
};

// --- A pass --------------------------------------------------------------------------------------
// GRADIENT: sum_b log Z_b, its gradient H'gamma = sum_b f_b v_b with v_b = H_b'(h / sigma), d and
// H_b'pull_b, multiplied in float64. Else sum_b log Z_b and W'(E - mu) = sum_b f_b H_b'P sigma h.
template <bool GRADIENT, typename Number>
__device__ void pass(
    const Bags& all, const double* sigma, const double* w, const float* p_diagonal,
    const int* neighbour, const float* p_weight, double* mean, double* above, double* partial,
    double* log_z, double* diagonal, double* per_bag, const double* prior_mean) {
    extern __shared__ __align__(128) unsigned char memory[];
    float* ring = (float*)memory;
    double* ring_mean = (double*)(ring + RING * M);
    double* ring_above = ring_mean + RING;
    double* parts = ring_above + RING;            // TEAMS x GROUPS x M
    double* of_warps = parts + TEAMS * GROUPS * M;  // TEAMS x 2 x WARPS, by turns
    Barrier* arrived = (Barrier*)(of_warps + TEAMS * 2 * WARPS);
    Barrier* given_back = arrived + SLOTS;
    Slot* slots = (Slot*)(given_back + SLOTS);

    if (threadIdx.x == 0) {
        for (int s = 0; s < 2 * SLOTS; ++s) init(arrived + s);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x >= TEAMS * THREADS) {
        send_for_rows(all, ring, slots, arrived, given_back);
        return;
    }
    Team team{(int)threadIdx.x / THREADS, (int)threadIdx.x % THREADS};
    int tid = team.tid, lane = tid % 32;
    Number w_here[PER_LANE][4];
    for (int q = 0; q < PER_LANE; ++q)
        for (int j = 0; j < 4; ++j)
            w_here[q][j] = lane + 32 * q < QUADS ? Number(w[4 * (lane + 32 * q) + j]) : Number(0);
    double c = *prior_mean, total = 0, own[4] = {0, 0, 0, 0};
    double* part = parts + team.number * GROUPS * M;
    int quad = tid % QUADS, group = tid / QUADS;

    int turn = team.number;
    for (int k = blockIdx.x + turn * gridDim.x; k < all.n_bags; k += TEAMS * gridDim.x, turn += TEAMS) {
        if (lane == 0) wait(arrived, turn);
        __syncwarp();
        Slot bag = slots[turn % SLOTS];
        Index start = bag.start;
        int n = bag.n, base = n <= RING ? bag.base : 0;
        bool small = n <= RING;
        RowsOfH H{small ? ring : all.H + start * M, base, small};
        Values mu{small ? ring_mean : mean + start, base, small};
        Values up{small ? ring_above : above + start, base, small};
        Rows<Number, CELL<Number>> x{(Number*)(GRADIENT ? up.at : mu.at), base, small};
        // asked for now, needed after the product
        Index first = start + (tid < n ? tid : 0);
        double s_first = sigma[first];
        Stencil near;
        if (!GRADIENT) near.load(p_diagonal, p_weight, neighbour, start, first);
        times<Number>(team, H, n, w_here, c, mu);
        team.together();

        // log q = sum_i log(1 - Phi(t_i)); sigma h, or h / sigma for a gradient
        double log_q = 0;
        for (int i = tid; i < n; i += THREADS) {
            double s = i == tid ? s_first : sigma[start + i], log_upper, h, gap;
            tails(*mu[i] / s, log_upper, h, gap);
            log_q += log_upper;
            *up[i] = GRADIENT ? h / s : s * h;
            if (GRADIENT) diagonal[start + i] = h * gap / (s * s);
        }
        log_q = sum_of_warp(log_q);
        double* sums = of_warps + (2 * team.number + (turn / TEAMS & 1)) * WARPS;
        if (lane == 0) sums[tid / 32] = log_q;
        team.together();
        if (!GRADIENT) {  // P sigma h
            for (int i = tid; i < n; i += THREADS) {
                if (i > tid) near.load(p_diagonal, p_weight, neighbour, start, start + i);
                *x[i] = Number(near.times(up, i));
            }
            team.together();
        }
        double v[4];
        against<Number>(team, H, n, x, v);
        if (GRADIENT && group < GROUPS)
            for (int j = 0; j < 4; ++j) part[group * M + 4 * quad + j] = v[j];
        team.together();
        if (tid == 0) arrive(given_back + turn % SLOTS);

        // log Z_b, and f_b with E - mu = f sigma h and d log Z / dmu = f h / sigma: r, or -1
        log_q = 0;
        for (int s = 0; s < WARPS; ++s) log_q += sums[s];
        double q = exp(log_q), not_q = minus_expm1(log_q, q);
        double factor = bag.is_positive ? q / not_q : -1.0;
        if (tid < 32) total += bag.is_positive ? log(not_q) : log_q;
        for (int j = 0; j < 4; ++j) own[j] += factor * v[j];
        if (GRADIENT) {
            for (int i = tid; i < n; i += THREADS) diagonal[start + i] *= -factor;
            double pull = bag.is_positive ? sqrt(q) / not_q : 0.0;
            for (int m = tid; m < M; m += THREADS) per_bag[bag.bag * M + m] = pull * over_groups(part, m);
        }
    }
    team.together();
    if (group < GROUPS)
        for (int j = 0; j < 4; ++j) part[group * M + 4 * quad + j] = own[j];
    team.together();
    Index row = (Index)blockIdx.x * TEAMS + team.number;
    for (int m = tid; m < M; m += THREADS) partial[row * M + m] = over_groups(part, m);
    if (tid == 0) log_z[row] = total;
}

#define LAUNCH __launch_bounds__(TEAMS * THREADS + 32, 1)

#ifdef SWEEP
extern "C" __global__ void LAUNCH sweep(
    const float* H, const double* sigma, const double* w, const float* diagonal,
    const int* neighbour, const float* weight, const Index* offsets,
    const signed char* positive, const Index* order, double* mean, double* above, double* partial,
    double* log_z, const double* prior_mean, int n_bags) {
    pass<false, float>(Bags{H, offsets, order, positive, n_bags}, sigma, w, diagonal, neighbour,
                       weight, mean, above, partial, log_z, nullptr, nullptr, prior_mean);
}

#endif
#ifdef RISE
extern "C" __global__ void LAUNCH rise(
    const float* H, const double* sigma, const double* w, const Index* offsets,
    const signed char* positive, const Index* order, double* mean, double* above, double* partial,
    double* log_z, double* diagonal, double* per_bag, const double* prior_mean, int n_bags) {
    pass<true, double>(Bags{H, offsets, order, positive, n_bags}, sigma, w, nullptr, nullptr,
                       nullptr, mean, above, partial, log_z, diagonal, per_bag, prior_mean);
}
#endif
