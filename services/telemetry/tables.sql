-- The audit of requests: one row for each request from its acceptance to its end.
--
-- Telemetry runs this file when it starts; every statement may run again. Where tables of this name exist
-- already (for example replicated ones, made by an operator with the same columns and sorting key), they are
-- used as they are.
--
-- One request_id is one row. A gateway may send a record twice, and a record that says "the gateway died"
-- may follow or precede the real end of the same request. Rows with the same sorting key are therefore
-- versions of one row: record_version makes a real end win over gateway_lost, whichever came first. All
-- versions of a request carry the accepted_time and tenant_id of its acceptance, so they meet in one
-- partition under one key. Old versions vanish when parts merge; until then only FINAL hides them, so read
-- the view inference_requests, which is always right:
--
--     SELECT tenant_id, sum(completion_tokens) FROM inference_requests
--     WHERE accepted_time >= now() - INTERVAL 1 DAY GROUP BY tenant_id
--
-- Repeats of a whole insert are dropped before they become rows: by their deduplication token, for the last
-- 1,000 inserts. An insert is on the disk when it is confirmed (fsync), because the spool forgets it then.

CREATE TABLE IF NOT EXISTS inference_requests_audit
(
    request_id        UUID                    COMMENT 'Made by the gateway',
    client_request_id String                  COMMENT 'x-request-id of the client, if any'              CODEC(ZSTD(1)),
    tenant_id         LowCardinality(String)  COMMENT 'Opaque name of the tenant',
    model_name        LowCardinality(String)  COMMENT 'Public name of the model',
    endpoint          LowCardinality(String)  COMMENT 'The route',
    is_streaming      Bool                    COMMENT 'Whether the answer was streamed',
    status            LowCardinality(String)  COMMENT 'stop, length, aborted, rejected, error or gateway_lost',
    error_reason      LowCardinality(String)  COMMENT 'Empty when all went well',
    http_status       UInt16                  COMMENT 'Seen by the client; 0 when it saw none'          CODEC(T64, ZSTD(1)),
    prompt_tokens     UInt32                  COMMENT 'Tokens of the prompt'                            CODEC(T64, ZSTD(1)),
    cached_tokens     UInt32                  COMMENT 'Of these, taken from the prefix cache'           CODEC(T64, ZSTD(1)),
    completion_tokens UInt32                  COMMENT 'Output tokens that the client pays for'          CODEC(T64, ZSTD(1)),
    discarded_tokens  UInt32                  COMMENT 'Sampled but never shown or billed'               CODEC(T64, ZSTD(1)),
    num_preemptions   UInt32                  COMMENT 'Times the engine started over for lack of blocks' CODEC(T64, ZSTD(1)),
    num_retries       UInt32                  COMMENT 'Placements beyond the first'                     CODEC(T64, ZSTD(1)),
    accepted_time     DateTime64(3, 'UTC')    COMMENT 'When the gateway accepted it'                    CODEC(Delta, ZSTD(1)),
    finished_time     Nullable(DateTime64(3, 'UTC')) COMMENT 'When it ended, if that is known'          CODEC(Delta, ZSTD(1)),
    ttft_ms           Nullable(Float64)       COMMENT 'Acceptance to first token; NULL when there was none' CODEC(ZSTD(1)),
    itl_ms            Nullable(Float64)       COMMENT 'Mean gap between deliveries; NULL below two'     CODEC(ZSTD(1)),
    e2e_ms            Nullable(Float64)       COMMENT 'Acceptance to last byte'                         CODEC(ZSTD(1)),
    queue_ms          Nullable(Float64)       COMMENT 'Time in the queue of the engine'                 CODEC(ZSTD(1)),
    engine_id         LowCardinality(String)  COMMENT 'Served it last; empty when none did',
    gateway_id        LowCardinality(String)  COMMENT 'Took it',
    record_version    UInt8 MATERIALIZED status != 'gateway_lost' COMMENT 'The higher one of two records wins',
    INDEX request_id_index request_id TYPE bloom_filter(0.01) GRANULARITY 1,
    INDEX client_request_id_index client_request_id TYPE bloom_filter(0.01) GRANULARITY 1
)
ENGINE = ReplacingMergeTree(record_version)
PARTITION BY toYYYYMM(accepted_time)
ORDER BY (tenant_id, toStartOfHour(accepted_time), request_id)
TTL toDateTime(accepted_time) + toIntervalDay({audit_ttl_days:UInt32})
SETTINGS
    ttl_only_drop_parts = 1,
    non_replicated_deduplication_window = 1000,
    fsync_after_insert = 1,
    fsync_part_directory = 1
COMMENT 'Requests and how they ended; read the view inference_requests';

CREATE OR REPLACE VIEW inference_requests AS
SELECT * FROM inference_requests_audit FINAL
-- All versions of a request are in one partition, so partitions need not be merged with each other.
SETTINGS do_not_merge_across_partitions_select_final = 1;
